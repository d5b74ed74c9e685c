from __future__ import annotations

import numpy as np
import pytest

from app.jobs.train_shapes.clips import draw_clips
from app.jobs.train_shapes.reader import agrees, all_right, read
from app.jobs.train_shapes.scene import Scene, Shape

CLIPS = 24


def frames_of(clip: object) -> np.ndarray:
    return ((clip.permute(1, 2, 3, 0) + 1) / 2).numpy()


def test_drawn_clips_are_read_right():
    """The reader must reach 99 %, which of 24 clips means all; 1,000 clips are read by the slow test below."""
    scenes, clips = draw_clips(CLIPS, 21, "cpu")
    for scene, clip in zip(scenes, clips, strict=True):
        reading = read(frames_of(clip))
        assert all(agrees(reading.scene, scene).values()), (scene, reading.scene)
        assert reading.colour_drift < 0.01


@pytest.mark.slow
def test_99_of_100_drawn_clips_are_read_right():
    right = []
    for part in range(50):
        scenes, clips = draw_clips(20, 1000 + part, "cpu", held_out=part % 2 == 1)
        right += [
            all_right(agrees(read(frames_of(clip)).scene, scene)) for scene, clip in zip(scenes, clips, strict=True)
        ]
    assert np.mean(right) >= 0.99


def test_an_empty_clip_holds_no_scene():
    assert read(np.zeros((17, 128, 128, 3), np.float32)).scene is None


def test_a_colour_that_fades_is_drift():
    frames = np.full((17, 128, 128, 3), 0.04, np.float32)
    frames[:, 40:80, 40:80] = (0.86, 0.10, 0.12)
    frames[-1, 40:80, 40:80] *= 0.9
    assert read(frames).colour_drift == pytest.approx(0.1, abs=1e-3)


def test_frames_of_another_size_are_refused():
    with pytest.raises(ValueError, match=r"frames: got shape \(17, 64, 64, 3\)"):
        read(np.zeros((17, 64, 64, 3), np.float32))


def test_only_stated_attributes_are_judged():
    found = Scene((Shape("red", "circle", "left", "small", "fast"),), "navy")
    assert agrees(found, Scene((Shape("red", "circle", "left"),), None, None, None)) == {
        "colour": True,
        "kind": True,
        "direction": True,
    }
    wrong = agrees(found, Scene((Shape("red", "circle", "right"),), "teal"))
    assert not wrong["direction"]
    assert not wrong["background"]
    assert not all_right(wrong)
