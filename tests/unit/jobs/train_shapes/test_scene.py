from __future__ import annotations

import random
from dataclasses import fields

import pytest

from app.jobs.train_shapes.scene import Scene, Shape, draw_scene, is_held_out, opposites


def test_an_unknown_colour_is_refused_with_the_allowed_ones():
    with pytest.raises(ValueError, match=r"Shape.colour: got 'pink', allowed are red, .* choose one"):
        Shape("pink", "circle", "left")


def test_a_still_shape_has_no_speed():
    with pytest.raises(ValueError, match=r"Shape.speed: got 'fast' for a shape that is still"):
        Shape("red", "circle", "still", speed="fast")


def test_a_pan_needs_stripes():
    with pytest.raises(ValueError, match=r"Scene.pan: got 'left' on texture 'plain'"):
        Scene((Shape("red", "circle", "left"),), "navy", "plain", "left")


def test_two_shapes_differ_in_colour():
    with pytest.raises(ValueError, match=r"Scene.shapes: both are 'red'"):
        Scene((Shape("red", "circle", "left"), Shape("red", "star", "up")), "navy")


def test_training_scenes_hold_no_held_out_shape_and_held_out_scenes_hold_one():
    rng = random.Random(0)
    for _ in range(500):
        assert not any(map(is_held_out, draw_scene(rng).shapes))
        assert any(map(is_held_out, draw_scene(rng, held_out=True).shapes))


def test_an_opposite_differs_in_exactly_the_named_attribute():
    rng = random.Random(1)
    for _ in range(100):
        scene = draw_scene(rng)
        for attribute, other in opposites(scene, rng).items():
            pairs = [(scene.shapes[0], other.shapes[0]), (scene, other)]
            changed = {
                field.name
                for one, two in pairs
                for field in fields(one)
                if field.name != "shapes" and getattr(one, field.name) != getattr(two, field.name)
            }
            assert changed == {attribute}
            assert scene.shapes[1:] == other.shapes[1:]
