from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from app.jobs.train_shapes.clips import draw_clips
from app.jobs.train_shapes.layout import place
from app.jobs.train_shapes.renderer import render
from app.jobs.train_shapes.scene import BACKGROUNDS, COLOURS, Scene, Shape

# Area over r * r of each outline, by hand.
AREAS = {
    "circle": math.pi,
    "square": (2 * 0.86) ** 2,
    "triangle": 3 * math.sqrt(3) * 0.575**2,  # equilateral with inscribed radius 0.575
    "ring": math.pi * (1 - 0.25),
    "star": 10 * 0.5 * 1.15 * 0.575 * math.sin(math.pi / 5),  # ten triangles from the centre
    "cross": 4 * 0.72 - 0.72**2,
}


@pytest.mark.parametrize("kind", AREAS)
def test_a_shape_covers_the_area_of_its_outline(kind: str):
    layout = place([Scene((Shape("white", kind, "still", "large"),), "black")], np.random.default_rng(0))
    clip = render(layout)[0, 0, 0]  # red of the first frame
    low, high = 2 * BACKGROUNDS["black"][0] - 1, 2 * COLOURS["white"][0] - 1
    area = float(((clip - low) / (high - low)).sum())
    # 4 %: the soft edge rounds the star's tips off
    assert area == pytest.approx(AREAS[kind] * float(layout.radius[0, 0]) ** 2, rel=0.04)


def test_clips_follow_from_the_seed_and_keep_their_range():
    scenes, clips = draw_clips(3, 11, "cpu")
    again, same = draw_clips(3, 11, "cpu")
    assert scenes == again
    assert torch.equal(clips, same)
    assert clips.shape == (3, 3, 17, 128, 128)
    assert -1 <= float(clips.min()) < float(clips.max()) <= 1


def test_a_pan_to_the_left_runs_the_stripes_to_the_right():
    layout = place(
        [Scene((Shape("red", "circle", "still", "small"),), "teal", "stripes", "left")], np.random.default_rng(0)
    )
    row = render(layout)[0, 2, :, 0]  # [T, W] blue of the top row
    assert torch.allclose(row[2, 3:], row[0, :-3], atol=1e-3)  # 1.5 px a frame
