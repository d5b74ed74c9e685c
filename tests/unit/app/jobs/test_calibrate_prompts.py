"""Prompt sets: sizes, digests, and that acceptance is unseen."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from app.jobs.prompt_set import Prompt, PromptSet, PromptSetError, require_apart
from app.jobs.train_shapes.grammar import parse

FOLDER = Path("configs/prompts")


def prompts(*texts: str, seeds: tuple[int, ...] = (1,), purpose: str = "calibration") -> PromptSet:
    return PromptSet.model_validate(
        {
            "format": "worldstage-prompts/1",
            "purpose": purpose,
            "seeds": seeds,
            "prompts": [Prompt(kind="slow", text=text) for text in texts],
        }
    )


@pytest.mark.parametrize("family", ["wan-shapes", "natural"])
def test_the_sets_have_the_protocols_sizes_and_are_apart(family: str):
    calibration = PromptSet.read(FOLDER / f"{family}-calibration.yaml")
    acceptance = PromptSet.read(FOLDER / f"{family}-acceptance.yaml")
    assert (calibration.purpose, len(calibration.videos())) == ("calibration", 48)
    assert (acceptance.purpose, len(acceptance.videos())) == ("acceptance", 36)
    require_apart(calibration, acceptance)


def test_the_shapes_sets_speak_the_grammar_and_share_no_scene():
    scenes = {
        purpose: [parse(p.text) for p in PromptSet.read(FOLDER / f"wan-shapes-{purpose}.yaml").prompts]
        for purpose in ("calibration", "acceptance")
    }
    assert not [scene for scene in scenes["acceptance"] if scene in scenes["calibration"]]
    for found in scenes.values():
        shapes = [shape for scene in found for shape in scene.shapes]
        assert {"slow", "fast"} <= {shape.speed for shape in shapes}
        assert "still" in {shape.direction for shape in shapes}
        assert {1, 2} == {len(scene.shapes) for scene in found}
        assert {"left", "right"} == {scene.pan for scene in found} - {"none"}


def test_the_natural_sets_cover_what_the_protocol_names():
    for purpose in ("calibration", "acceptance"):
        kinds = {prompt.kind for prompt in PromptSet.read(FOLDER / f"natural-{purpose}.yaml").prompts}
        assert kinds >= {"static", "slow", "fast", "camera", "people", "text", "animals", "water", "fire"}


def test_first_videos_are_of_different_prompts():
    found = prompts("a ball", "a box", seeds=(1, 2)).videos()
    assert [(v.prompt, v.seed) for v in found] == [("a ball", 1), ("a box", 1), ("a ball", 2), ("a box", 2)]
    assert len({video.name for video in found}) == 4


def test_a_seen_prompt_or_seed_is_refused():
    seen = prompts("a red ball moves left, slowly", "a box")
    require_apart(seen, prompts("a blue ball moves left, slowly", seeds=(2,)))
    with pytest.raises(PromptSetError, match="slowly the red ball moves left"):  # the same words in another order
        require_apart(seen, prompts("slowly the red ball moves left", seeds=(2,)))
    with pytest.raises(PromptSetError, match=r"seeds \[1\]"):
        require_apart(seen, prompts("a star", seeds=(1, 3)))


def test_a_prompt_twice_is_refused():
    with pytest.raises(ValidationError, match="say the same"):
        prompts("a red ball", "A  red ball")


def test_formatting_does_not_change_the_digest_but_content_does(tmp_path: Path):
    one = prompts("a ball", "a box")
    (tmp_path / "set.yaml").write_text("# a comment\n" + one.to_yaml())
    assert PromptSet.read(tmp_path / "set.yaml").digest == one.digest
    assert one.first(1, None).digest != one.digest
