"""Check 17: who may win."""

from __future__ import annotations

from typing import Literal

import pytest

from deployments.plan import BRANCHES
from deployments.stage_cache.gates import GateValues
from deployments.stage_cache.selection import Candidate, HitCount, select


def candidate(
    name: str,
    error: float = 0.05,
    ratio: float = 0.8,
    pp: int = 2,
    split: Literal["calibration", "held_out"] = "calibration",
    idle: tuple[int, str] | None = None,
) -> Candidate:
    return Candidate(
        name=name,
        split=split,
        pp=pp,
        reuse=(12, 15),
        predictor="ls2",
        gates=GateValues(
            videos=48, mean_ssim=0.99, min_video_ssim=0.97, mean_temporal_error_ratio=error, latency_ratio=ratio
        ),
        hits=tuple(
            HitCount(stage=stage, branch=branch, hits=0 if (stage, branch) == idle else 96)
            for stage in range(pp)
            for branch in BRANCHES
        ),
    )


def test_the_fastest_passing_candidate_wins() -> None:
    chosen = select([candidate("fast but wrong", 0.11, 0.6), candidate("a", ratio=0.85), candidate("b", ratio=0.84)], 2)
    assert (chosen.winner.name, chosen.diagnostic_only) == ("b", False)


def test_without_a_pass_the_closest_is_diagnostic_only() -> None:
    chosen = select([candidate("far", 0.30, 0.8), candidate("near", 0.12, 0.8), candidate("slow", 0.05, 1.2)], 2)
    assert (chosen.winner.name, chosen.diagnostic_only) == ("near", True)


def test_equal_scores_go_to_the_faster() -> None:
    chosen = select([candidate("slow", 0.2, 0.8), candidate("fast", 0.2, 0.7)], 2)
    assert (chosen.winner.name, chosen.diagnostic_only) == ("fast", True)


@pytest.mark.parametrize("idle", [(stage, branch) for stage in (0, 1) for branch in BRANCHES])
def test_a_candidate_needs_hits_everywhere(idle: tuple[int, str]) -> None:
    chosen = select([candidate("partial", ratio=0.5, idle=idle), candidate("whole", ratio=0.8)], 2)
    assert chosen.winner.name == "whole"
    with pytest.raises(ValueError, match="hit in every stage and branch"):
        select([candidate("partial", idle=idle)], 2)


def test_held_out_results_and_other_stages_are_errors() -> None:
    with pytest.raises(ValueError, match=r"\['peek'\] were measured on held-out data"):
        select([candidate("a"), candidate("peek", split="held_out")], 2)
    with pytest.raises(ValueError, match=r"one \(pp 1\)"):
        select([candidate("a"), candidate("one", pp=1)], 2)
