"""Sheets of first, middle and last frames: native beside cached, one row a video."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from app.jobs.video_pair import Frames

TEXT_ROW = 14  # pixels
GAP = 6
LARGEST_TILE = 160


class SheetRow(NamedTuple):
    """One video; tiles as `three_frames` gives them."""

    prompt: str
    native: NDArray[np.uint8]
    cached: NDArray[np.uint8]


def three_frames(frames: Frames) -> NDArray[np.uint8]:
    """First, middle and last: [3, H, W, 3]."""
    return frames[[0, len(frames) // 2, len(frames) - 1]]


def write_sheet(path: Path, rows: Sequence[SheetRow]) -> None:
    """A PNG: left native, right cached."""
    height, width = rows[0].native.shape[1:3]
    scale = min(1.0, LARGEST_TILE / max(height, width))
    size = (max(1, round(width * scale)), max(1, round(height * scale)))
    image = Image.new("RGB", (6 * size[0] + GAP, len(rows) * (size[1] + TEXT_ROW)), "white")
    pen = ImageDraw.Draw(image)
    for index, row in enumerate(rows):
        top = index * (size[1] + TEXT_ROW)
        pen.text((2, top + 1), row.prompt, fill="black")
        for place, tile in enumerate([*row.native, *row.cached]):
            left = place * size[0] + (GAP if place > 2 else 0)
            image.paste(Image.fromarray(tile).resize(size), (left, top + TEXT_ROW))
    image.quantize(256, dither=Image.Dither.NONE).save(path, optimize=True)
