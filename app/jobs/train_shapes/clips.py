"""Seeded clips of the world: scenes, their layouts and their drawings."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from app.jobs.train_shapes.layout import place
from app.jobs.train_shapes.renderer import draw, render
from app.jobs.train_shapes.scene import Scene, draw_scene


def seed_of(*parts: object) -> int:
    """A 32 bit seed that depends on every part, as in seed_of(seed, "vae", step)."""
    return zlib.crc32(" ".join(map(str, parts)).encode())


def draw_clips(
    count: int, seed: int, device: torch.device | str, held_out: bool = False, drawing: Callable[..., Tensor] = draw
) -> tuple[list[Scene], Tensor]:
    """`count` scenes and their clips [count, 3, 17, 128, 128] float32 in [-1, 1]; the same seed gives the same
    clips."""
    rng = random.Random(seed)
    scenes = [draw_scene(rng, held_out) for _ in range(count)]
    return scenes, render(place(scenes, np.random.default_rng(seed)), device, drawing)
