"""How many chunks the benchmark makes, and what it steers."""

from __future__ import annotations

from app.jobs.prove_world.trajectories import MAIN
from deployments.lingbot.controls import ChunkControls, Keys, key_frames

ROOT = b"\1" * 32
"""Key of the benchmark's world."""
PARKED = 8
"""Chunks of the session that is parked and brought back."""
AFTER = 2
"""Chunks it makes then."""
OVERLAPPED = 6
"""Chunks made while the one before is decoded."""
STEADY = 4
"""The last of the parked session's chunks, over which medians are taken: the window is full."""
CUT = 6
"""Chunks made on two stages."""
COMPARED = 3
"""The parked session's last chunks, whose keys and values are compared: a gigabyte each at the 1.3B size."""
TOTAL = PARKED + AFTER + OVERLAPPED
"""Of the longest world."""


def controls(chunk_index: int, chunk: int) -> ChunkControls:
    """Of any chunk of the benchmark's world.  chunk: latent frames."""
    held = frozenset(MAIN[chunk_index % len(MAIN)])
    return ChunkControls(Keys((held,) * key_frames(chunk_index, chunk)))
