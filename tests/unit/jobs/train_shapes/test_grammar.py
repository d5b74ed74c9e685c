from __future__ import annotations

import random
import subprocess
import sys

import pytest

from app.jobs.train_shapes.grammar import (
    DIRECTION_FORMS,
    HELD_OUT_WORDINGS,
    VERBS,
    caption,
    held_out_prompts,
    paraphrases,
    parse,
    tokens,
    vocabulary,
)
from app.jobs.train_shapes.scene import Scene, Shape, draw_scene, is_held_out, unstate


def same(one: Scene, two: Scene) -> bool:
    """Equal up to the order of the shapes, which a caption may turn round."""
    ground = (one.background, one.texture, one.pan) == (two.background, two.texture, two.pan)
    return ground and set(one.shapes) == set(two.shapes)


def test_parse_is_the_inverse_of_caption():
    rng = random.Random(0)
    for i in range(2000):
        scene = unstate(draw_scene(rng, held_out=i % 5 == 0), rng)
        text = caption(scene, rng, held_out=i % 3 == 0)
        assert same(parse(text), scene), text
        assert set(tokens(text)) <= set(vocabulary())


def test_a_ball_that_glides_is_a_circle_that_moves():
    meant = Scene((Shape("red", "circle", "right"),), "navy")
    assert parse("A red ball glides to the right on a navy background") == meant
    assert parse("over a plain navy backdrop, a red circle moving right") == meant


def test_paraphrases_are_different_captions_of_one_meaning():
    scene = Scene((Shape("blue", "ring", "up", "large", "slow"), Shape("white", "star", "still")), "teal", "gradient")
    found = paraphrases(scene, 50, random.Random(0))
    assert len(set(found)) == 50
    assert all(same(parse(text), scene) for text in found)


def test_more_paraphrases_than_there_are_wordings_is_refused():
    with pytest.raises(ValueError, match=r"count: got 100000"):
        paraphrases(Scene((Shape("red", "star", "still"),), None, None, None), 100_000, random.Random(0))


def test_held_out_prompts_follow_from_the_seed_and_show_unseen_shapes():
    prompts = held_out_prompts(0, 64)
    assert prompts == held_out_prompts(0, 64) != held_out_prompts(1, 64)
    assert len({text for text, _ in prompts}) == 64
    for text, scene in prompts:
        assert same(parse(text), scene)
        assert any(map(is_held_out, scene.shapes))
        assert scene.background is not None


def test_training_captions_never_hold_a_held_out_wording():
    words = {
        (VERBS[verb][form], ending)
        for verb, form_name in HELD_OUT_WORDINGS
        for form in (0, 1)
        for ending in DIRECTION_FORMS[form_name].values()
    }
    adverbs = ("slowly ", "gently ", "quickly ", "fast ")
    rng = random.Random(2)
    for _ in range(2000):
        text = caption(unstate(draw_scene(rng), rng), rng)
        for adverb in adverbs:
            text = text.replace(f" {adverb}", " ")
        assert not any(f" {verb} {ending} " in f"{text.replace(',', ' ')} " for verb, ending in words), text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a red dog moves left", "word 'dog' is outside the grammar"),
        ("moves left, a red ball", "stands before any shape"),
        ("a ball moves left", "states no colour"),
    ],
)
def test_a_sentence_outside_the_grammar_is_refused(text: str, message: str):
    with pytest.raises(ValueError, match=message):
        parse(text)


def test_the_grammar_imports_neither_torch_nor_ray():
    code = "import sys, app.jobs.train_shapes.grammar; sys.exit(bool({'torch', 'ray', 'numpy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
