"""The proof's own logic: where the fork lies, and that every check can fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from app.jobs.prove_world.run_result import RunResult, checks, guards
from app.jobs.prove_world.trajectories import trajectory
from cache_actors.keys import path_keys
from deployments.lingbot.controls import ChunkControls, key_frames


def run(tag: str, known: int, frames: str) -> RunResult:
    return RunResult(
        tag=tag,
        fast_forward_k=known,
        n_chunks=3,
        n_frames=len(frames),
        wall_s=1,
        load_s=1,
        flush_s=0,
        chunk_times_s=(),
        passes={},
        frame_sha256=tuple(frames),
        pid=ord(tag),
    )


def runs() -> dict[str, RunResult]:
    """Two frames a chunk, a prefix of one chunk."""
    return {
        "A": run("A", 0, "abcdef"),
        "B": run("B", 3, "abcdef"),
        "C": run("C", 1, "abwxyz"),
        "D": run("D", 0, "abwxyz"),
    }


def test_a_run_as_it_should_be_passes() -> None:
    assert list(checks(runs(), 1).values()) == [True] * 6
    assert list(guards(runs(), 2).values()) == [True] * 4


FAULTS: dict[str, dict[str, Any]] = {
    "A_cold": {"A": {"fast_forward_k": 1}},
    "B_full_hit": {"B": {"fast_forward_k": 2}},
    "B_frames_equal_A": {"B": {"frame_sha256": tuple("abcdeg")}},
    "C_prefix_hit": {"C": {"fast_forward_k": 0}},
    "D_cold": {"D": {"fast_forward_k": 1}},
    "C_frames_equal_D": {"D": {"frame_sha256": tuple("abwxyy")}},
    "processes_differ": {"B": {"pid": ord("A")}},
    "frames_change": {"A": {"frame_sha256": tuple("abcdee")}, "B": {"frame_sha256": tuple("abcdee")}},
    "fork_shares_the_prefix": {tag: {"frame_sha256": tuple("aqwxyz")} for tag in "CD"},
    "fork_changes_the_rest": {tag: {"frame_sha256": tuple("abcxyz")} for tag in "CD"},
}


@pytest.mark.parametrize("name", FAULTS)
def test_each_check_fails_alone(name: str) -> None:
    faulty = {tag: one.model_copy(update=FAULTS[name].get(tag, {})) for tag, one in runs().items()}
    results = checks(faulty, 1) | guards(faulty, 2)
    assert [check for check, holds in results.items() if not holds] == [name]


def test_the_fork_leaves_the_trajectory_after_the_prefix() -> None:
    main, fork = (trajectory(61, 2, 3, forked=forked) for forked in (False, True))
    assert len(main) == len(fork) == 5  # 61 frames are 16 latents
    keys = [path_keys(b"r" * 32, [chunk.canonical() for chunk in path]) for path in (main, fork)]
    assert [a == b for a, b in zip(*keys, strict=True)] == [True, True, False, False, False]
    for index, chunk in enumerate(fork):
        chunk.check(index, 3)
        assert len(chunk.camera.frames) == key_frames(index, 3)  # type: ignore[union-attr]


Ask = Callable[[], tuple[ChunkControls, ...]]


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        # 13 frames are 4 latents, one chunk of 3: a fork after it would repeat the trajectory.
        (lambda: trajectory(13, 1, 3, forked=True), r"1 chunks of 3 latents; .* the fork needs at least 21$"),
        (lambda: trajectory(33, 2, 4, forked=True), r"2 chunks of 4 latents; .* the fork needs at least 45$"),
        (lambda: trajectory(22, 1, 3, forked=True), r"frame_num: got 22, expected 4n \+ 1, such as 21"),
        (lambda: trajectory(21, 0, 3, forked=True), "prefix_chunks: got 0, expected 1 or more"),
    ],
)
def test_a_fork_outside_the_frames_is_refused(ask: Ask, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ask()


def test_the_shortest_proof_is_accepted() -> None:
    assert len(trajectory(21, 1, 3, forked=True)) == 2
