from __future__ import annotations

import random

import numpy as np

from app.jobs.train_shapes.layout import FRAMES, MARGIN, OUTREACH, SIDE, place
from app.jobs.train_shapes.scene import Scene, Shape, draw_scene


def test_shapes_stay_inside_the_frame_and_apart():
    rng = random.Random(0)
    layout = place([draw_scene(rng) for _ in range(400)], np.random.default_rng(0))
    reach = OUTREACH * layout.radius[..., None, None] + MARGIN - 1e-3
    inside = (layout.centre >= reach) & (layout.centre <= SIDE - reach)
    assert inside[layout.radius > 0].all()
    pairs = layout.radius[:, 1] > 0
    distance = np.linalg.norm(layout.centre[pairs, 0] - layout.centre[pairs, 1], axis=-1)
    assert (distance.min(1) > OUTREACH * layout.radius[pairs].sum(1)).all()


def test_a_fast_shape_that_moves_up_travels_about_48_pixels_upwards():
    scene = Scene((Shape("red", "star", "up", "small", "fast"),), "black")
    centre = place([scene], np.random.default_rng(3)).centre[0, 0]
    way = centre[FRAMES - 1] - centre[0]
    assert way[0] == 0
    assert 43 <= -way[1] <= 53  # 48 px within a tenth


def test_the_same_seed_gives_the_same_layout():
    scenes = [draw_scene(random.Random(5))]
    one, two = (place(scenes, np.random.default_rng(7)) for _ in range(2))
    assert all(np.array_equal(getattr(one, name), getattr(two, name)) for name in vars(one))
