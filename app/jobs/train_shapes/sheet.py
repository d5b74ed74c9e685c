"""A contact sheet: prompts with five frames each, as one small PNG."""

from __future__ import annotations

import textwrap
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

SHOWN = (0, 4, 8, 12, 16)  # frames
TILE = 96  # px
TEXT_ROW = 28  # px for two lines
COLUMNS = 2


def write_sheet(path: Path, prompts: list[str], videos: np.ndarray) -> None:
    """prompts: N texts; videos: [N, 17, H, W, 3] float in [0, 1]. Two prompts a row."""
    rows = -(-len(prompts) // COLUMNS)
    width, height = len(SHOWN) * TILE + 8, TILE + TEXT_ROW
    sheet = Image.new("RGB", (COLUMNS * width, rows * height), "white")
    pen = ImageDraw.Draw(sheet)
    for i, (prompt, video) in enumerate(zip(prompts, videos, strict=True)):
        left, top = (i % COLUMNS) * width, (i // COLUMNS) * height
        pen.text((left + 2, top + 1), "\n".join(textwrap.wrap(prompt, 78)[:2]), fill="black")
        for k, frame in enumerate(SHOWN):
            tile = Image.fromarray((video[frame] * 255).round().astype(np.uint8)).resize(
                (TILE, TILE), Image.Resampling.LANCZOS
            )
            sheet.paste(tile, (left + k * TILE, top + TEXT_ROW))
    sheet.save(path, optimize=True)  # in full colour: a palette of 256 turned small purple shapes gray
