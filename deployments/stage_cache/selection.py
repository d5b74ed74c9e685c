"""Which candidate of a search becomes the profile.  Held-out results never enter: the proof would become a fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from deployments.plan import BRANCHES, Branch
from deployments.stage_cache.closed import Closed
from deployments.stage_cache.gates import GateValues


class HitCount(Closed):
    """Steps one stage reused for one branch, summed over the candidate's videos."""

    stage: int = Field(ge=0)
    branch: Branch
    hits: int = Field(ge=0)


class Candidate(Closed):
    """One measured schedule and predictor; every candidate is recorded, pass or fail."""

    name: str
    split: Literal["calibration", "held_out"]
    pp: int = Field(ge=1)
    reuse: tuple[int, ...]
    predictor: str
    gates: GateValues
    hits: tuple[HitCount, ...]

    @property
    def hits_everywhere(self) -> bool:
        """Whether every stage reused at least one step of every branch."""
        seen = {(count.stage, count.branch) for count in self.hits if count.hits > 0}
        return seen >= {(stage, branch) for stage in range(self.pp) for branch in BRANCHES}


@dataclass(frozen=True)
class Selection:
    """The outcome of a search."""

    winner: Candidate
    diagnostic_only: bool
    """No candidate passed all four gates: the winner may be studied, and is never qualified."""


def select(candidates: Sequence[Candidate], pp: int) -> Selection:
    """The passing candidate with the lowest latency ratio; else the smallest gate score, ties by latency.

    Raises ValueError for held-out results, results of another pp, or when no candidate has hits everywhere.
    """
    held_out = [candidate.name for candidate in candidates if candidate.split != "calibration"]
    if held_out:
        raise ValueError(f"candidates: {held_out} were measured on held-out data; select on calibration data only")
    foreign = [f"{candidate.name} (pp {candidate.pp})" for candidate in candidates if candidate.pp != pp]
    if foreign:
        raise ValueError(f"candidates: {foreign} were measured with another number of stages than {pp}")
    eligible = [candidate for candidate in candidates if candidate.hits_everywhere]
    if not eligible:
        raise ValueError(f"candidates: none of {len(candidates)} has a hit in every stage and branch; choose more hits")
    passing = [candidate for candidate in eligible if not candidate.gates.failures()]
    if passing:
        return Selection(min(passing, key=lambda c: c.gates.latency_ratio), diagnostic_only=False)
    closest = min(eligible, key=lambda c: (c.gates.score, c.gates.latency_ratio))
    return Selection(closest, diagnostic_only=True)
