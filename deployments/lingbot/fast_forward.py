"""The cheapest exact way to where a world already is: for its window of keys and values, and for its frames.

Every way gives the same bits, so measured costs alone decide.

    window   what is live + clean passes      or      blobs restored at some chunk + clean passes from there
    frames   fetched, or decoded; a decoder that was left behind is warmed with the last 40 latents first
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from deployments.lingbot.stream_config import WARM_LATENTS, StreamConfig


@dataclass(frozen=True)
class ChunkCosts:
    """Seconds a chunk, measured on the gang and the decoder that would do the work."""

    generate: float
    """All denoise steps and the clean pass."""
    clean: float
    """The clean pass alone."""
    restore: float
    """Copying one chunk's keys and values to every stage."""
    decode: float
    """Latents to frames."""
    frames: float
    """Fetching frames that are stored."""


@dataclass(frozen=True)
class CatchUp:
    """How a session's window gets to `stop` chunks."""

    restore: int | None
    """Restore the window after so many chunks first; None goes on from what is live."""
    start: int
    """Clean passes for chunks start .. stop - 1."""
    stop: int
    seconds: float


def cheapest_catch_up(live: int, target: int, kept: Sequence[bool], stream: StreamConfig, costs: ChunkCosts) -> CatchUp:
    """live: chunks in the live window, 0 for none.  target: chunks it shall have, at least `live`.
    kept: for each chunk before target, whether every stage has its keys and values.
    """
    if not 0 <= live <= target <= len(kept):
        raise ValueError(f"target: got {target}, expected {live} (live) to {len(kept)} (known chunks)")
    best = CatchUp(None, live, target, (target - live) * costs.clean)
    for boundary in range(live + 1, target + 1):
        needed = stream.needed_chunks(boundary)
        if all(kept[chunk] for chunk in needed):
            seconds = len(needed) * costs.restore + (target - boundary) * costs.clean
            if seconds < best.seconds:
                best = CatchUp(boundary, boundary, target, seconds)
    return best


FrameOp = Literal["fetch", "decode", "warm+decode"]


@dataclass(frozen=True)
class FramePlan:
    """How the frames of consecutive chunks come about."""

    ops: tuple[FrameOp, ...]
    warm_after: bool
    """Whether the decoder must be warmed after the last of them, for the chunk that follows."""
    seconds: float


def cheapest_frames(
    start: int, stored: Sequence[bool], decoder_at: int | None, chunk: int, costs: ChunkCosts, *, goes_on: bool
) -> FramePlan:
    """The frames of chunks start .. start + len(stored) - 1.

    stored: for each of them, whether its frames can be fetched.  decoder_at: chunks the session's decoder has seen,
    None without one.  chunk: latent frames of a chunk.  goes_on: whether another chunk will be decoded afterwards.
    """

    def warm(position: int) -> float:
        return costs.decode * min(position * chunk, WARM_LATENTS) / chunk

    # By whether the decoder stands at the chunk at hand: cheapest cost and ops so far.
    ways: dict[bool, tuple[float, tuple[FrameOp, ...]]] = {decoder_at == start or start == 0: (0.0, ())}
    for position, is_stored in enumerate(stored, start=start):
        ahead: dict[bool, tuple[float, tuple[FrameOp, ...]]] = {}
        for ready, (seconds, ops) in ways.items():
            op: FrameOp = "decode" if ready else "warm+decode"
            options = [(True, seconds + costs.decode + (0 if ready else warm(position)), (*ops, op))]
            if is_stored:
                options.append((False, seconds + costs.frames, (*ops, "fetch")))
            for now_ready, cost, way in options:
                if now_ready not in ahead or cost < ahead[now_ready][0]:
                    ahead[now_ready] = (cost, way)
        ways = ahead
    end = start + len(stored)
    plans = [
        FramePlan(ops, goes_on and not ready, seconds + (warm(end) if goes_on and not ready else 0.0))
        for ready, (seconds, ops) in ways.items()
    ]
    return min(plans, key=lambda plan: plan.seconds)
