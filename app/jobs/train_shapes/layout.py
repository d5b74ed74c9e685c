"""Where the shapes of a scene stand in every frame.

Axes: N clips, S = 2 shape slots, T = 17 frames. Lengths are pixels of a 128 x 128 frame, y points down. Numpy only.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from app.jobs.train_shapes.scene import BACKGROUNDS, COLOURS, KINDS, TEXTURES, Scene, Shape, stated

FRAMES = 17
SIDE = 128
RADIUS = {"small": 12.0, "large": 19.0}
TRAVEL = {"slow": 20.0, "fast": 48.0}  # from the first to the last frame
STEP = {"left": (-1.0, 0.0), "right": (1.0, 0.0), "up": (0.0, -1.0), "down": (0.0, 1.0), "still": (0.0, 0.0)}
OUTREACH = 1.15  # every kind lies inside a circle of 1.15 radii
MARGIN = 3.0  # between that circle and the edge of the frame
GAP = 5.0  # wanted between the circles of two shapes at every moment
CANDIDATES = 96
PAN_PX = {"none": 0.0, "left": 1.5, "right": -1.5}  # how far the ground runs each frame


@dataclass(frozen=True)
class Layout:
    """Numbers of N clips, ready to be drawn."""

    kind: np.ndarray  # [N, S] int64, index in KINDS
    rgb: np.ndarray  # [N, S, 3] float32 in [0, 1]
    radius: np.ndarray  # [N, S] float32 px, 0 where the slot is empty
    centre: np.ndarray  # [N, S, T, 2] float32 px, (x, y)
    ground: np.ndarray  # [N, 3] float32 in [0, 1]
    texture: np.ndarray  # [N] int64, index in TEXTURES
    phase: np.ndarray  # [N] float32 px, where the stripes begin
    pan: np.ndarray  # [N] float32 px a frame


def _travel(shape: Shape) -> float:
    return 0.0 if shape.direction == "still" else TRAVEL[stated(shape.speed, "speed")]


def place(scenes: list[Scene], rng: np.random.Generator) -> Layout:
    """Random places for fully stated scenes: inside the frame, and two shapes never over each other.

    Of 96 candidate places per clip the first that keeps the gap is taken, or the one with the widest gap.
    """
    n = len(scenes)
    kind, radius = np.zeros((n, 2), np.int64), np.zeros((n, 2), np.float32)
    rgb, travel = np.zeros((n, 2, 3), np.float32), np.zeros((n, 2, 2), np.float32)
    for i, scene in enumerate(scenes):
        for s, shape in enumerate(scene.shapes):
            kind[i, s], rgb[i, s], radius[i, s] = (
                KINDS.index(stated(shape.kind, "kind")),
                COLOURS[stated(shape.colour, "colour")],
                RADIUS[stated(shape.size, "size")],
            )
            travel[i, s] = np.multiply(STEP[stated(shape.direction, "direction")], _travel(shape))
    radius *= rng.uniform(0.94, 1.06, radius.shape).astype(np.float32)
    travel *= rng.uniform(0.9, 1.1, (n, 2, 1)).astype(np.float32)
    reach = MARGIN + OUTREACH * radius[..., None] + np.abs(travel) / 2  # [N, S, 2]
    middle = reach[:, None] + rng.random((n, CANDIDATES, 2, 2), np.float32) * (
        SIDE - 2 * reach[:, None]
    )  # [N, K, S, 2]
    time = np.linspace(-0.5, 0.5, FRAMES, dtype=np.float32)
    apart = (middle[:, :, 0] - middle[:, :, 1])[:, :, None] + ((travel[:, 0] - travel[:, 1])[:, None] * time[:, None])[
        :, None
    ]  # [N, K, T, 2]
    gap = np.sqrt((apart**2).sum(-1)).min(-1) - OUTREACH * radius.sum(-1)[:, None]
    chosen = np.minimum(gap, GAP).argmax(1)
    centre = middle[np.arange(n), chosen][:, :, None] + travel[:, :, None] * time[:, None]
    return Layout(
        kind=kind,
        rgb=rgb,
        radius=radius,
        centre=centre.astype(np.float32),
        ground=np.array([BACKGROUNDS[stated(scene.background, "background")] for scene in scenes], np.float32),
        texture=np.array([TEXTURES.index(stated(scene.texture, "texture")) for scene in scenes], np.int64),
        phase=rng.uniform(0, SIDE, n).astype(np.float32),
        pan=np.array([PAN_PX[stated(scene.pan, "pan")] for scene in scenes], np.float32),
    )
