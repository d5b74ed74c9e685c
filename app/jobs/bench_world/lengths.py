"""How many chunks the benchmark makes, and what it steers."""

from __future__ import annotations

from app.jobs.prove_world.trajectories import MAIN
from deployments.lingbot.controls import ChunkControls, Keys, key_frames

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
KEPT = PARKED + AFTER + 2
"""Chunks whose keys and values have room in the host's memory."""
TOTAL = PARKED + AFTER + OVERLAPPED
"""Of the longest world."""


def controls(chunk_index: int, chunk: int) -> ChunkControls:
    """Of any chunk of the benchmark's world.  chunk: latent frames."""
    held = frozenset(MAIN[chunk_index % len(MAIN)])
    return ChunkControls(Keys((held,) * key_frames(chunk_index, chunk)))
