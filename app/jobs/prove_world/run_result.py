"""What the four runs gave, and what it proves."""

from __future__ import annotations

from collections.abc import Mapping

from cache_actors.closed import Closed


class RunResult(Closed):
    """One run."""

    tag: str
    """A to D."""
    fast_forward_k: int
    """Chunks taken from the cache."""
    n_chunks: int
    n_frames: int
    wall_s: float
    """From opening the world to its last frame, models loaded before."""
    load_s: float
    flush_s: float
    """Of `wall_s`: waiting until chunks were on the cache's disk."""
    chunk_times_s: tuple[float, ...]
    """Of every chunk that was made, the window's replay included."""
    passes: dict[str, int]
    """Passes through the transformer by operation."""
    frame_sha256: tuple[str, ...]
    pid: int


def checks(runs: Mapping[str, RunResult], prefix_chunks: int) -> dict[str, bool]:
    """A cold, B a full hit of A, C a fork of A after the prefix, D the same fork with an empty cache."""
    a, b, c, d = (runs[tag] for tag in "ABCD")
    return {
        "A_cold": a.fast_forward_k == 0,
        "B_full_hit": b.fast_forward_k == b.n_chunks == a.n_chunks,
        "B_frames_equal_A": b.frame_sha256 == a.frame_sha256,
        "C_prefix_hit": c.fast_forward_k == prefix_chunks,
        "D_cold": d.fast_forward_k == 0,
        "C_frames_equal_D": c.frame_sha256 == d.frame_sha256,
    }


def guards(runs: Mapping[str, RunResult], prefix_frames: int) -> dict[str, bool]:
    """What keeps the checks from holding for nothing.  prefix_frames: video frames of the prefix."""
    a, c = runs["A"], runs["C"]
    return {
        "processes_differ": len({run.pid for run in runs.values()}) == len(runs),
        "frames_change": len(set(a.frame_sha256)) == a.n_frames > 0,
        "fork_shares_the_prefix": c.frame_sha256[:prefix_frames] == a.frame_sha256[:prefix_frames],
        "fork_changes_the_rest": not set(c.frame_sha256[prefix_frames:]) & set(a.frame_sha256),
    }
