"""Which steps of a request reuse: decided once, on the host, before the first step.

Invariant: a schedule is a function of the profile and the solver's timesteps.  It is the same for every prompt and
seed, for both guidance branches and for all stages, so nobody has to ask anybody, and no device value is ever read.

    d_i = mean|m_i - m_(i-1)| / mean|m_(i-1)|            m: timestep signal, see `timestep_signal`
    forced step (warm-up, cool-down)    full, A = 0
    d_i outside the calibrated range    full, A = 0, counted
    otherwise                           A = A + max(P(d_i), 0);  A < threshold reuses and keeps A,  else full, A = 0

Every stage has its own P and its own A.  A step reuses only if every stage allows it; a full step clears every A.
The official code (ali-vilab/TeaCache, TeaCache4Wan2.1/teacache_generate.py) neither clamps nor guards the range: its
polynomials are negative outside the range they were fitted on, which makes exactly the uncalibrated steps free.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

from pydantic import Field

from deployments.stage_cache.closed import Closed, digest_of
from deployments.stage_cache.coefficients import Coefficients


class ScheduleError(ValueError):
    """A schedule breaks its own shape or the limits it was declared with."""


@dataclass(frozen=True)
class Schedule:
    """The steps of one request that reuse; all others are full.  Steps count from 0, hits are strictly increasing."""

    steps: int
    reuse: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ScheduleError(f"steps: got {self.steps}, expected at least 1")
        if list(self.reuse) != sorted(set(self.reuse)):
            raise ScheduleError(f"reuse: got {list(self.reuse)}, expected strictly increasing steps")
        if self.reuse and not 1 <= self.reuse[0] <= self.reuse[-1] < self.steps:
            raise ScheduleError(f"reuse: got {list(self.reuse)}, expected steps between 1 and {self.steps - 1}")

    @cached_property
    def _hits(self) -> frozenset[int]:
        return frozenset(self.reuse)

    def reuses(self, step: int) -> bool:
        return step in self._hits

    def anchors(self, step: int, count: int) -> tuple[int, ...]:
        """The last ``count`` full steps before ``step``, newest first; fewer when there are fewer."""
        full = [earlier for earlier in range(step - 1, -1, -1) if earlier not in self._hits]
        return tuple(full[:count])

    def anchor_steps(self, count: int) -> frozenset[int]:
        """The full steps whose residual some later hit needs; the residuals of all others need not be kept."""
        return frozenset(anchor for hit in self.reuse for anchor in self.anchors(hit, count))

    def until(self, step: int) -> Schedule:
        """The same schedule with every step from ``step`` on full: what a guard's veto leaves."""
        return Schedule(self.steps, tuple(hit for hit in self.reuse if hit < step))

    @cached_property
    def digest(self) -> str:
        """SHA-256 that ranks compare; equal exactly for equal schedules."""
        return digest_of({"steps": self.steps, "reuse": list(self.reuse)})


class SkipLimits(Closed):
    """What no schedule may do, whatever its rule says.  All values count solver steps, never model calls."""

    warmup_steps: int = Field(6, ge=1, description="First steps that are full: early errors grow along the trajectory.")
    cooldown_steps: int = Field(8, ge=0, description="Last steps that are full: sigma moves fastest there.")
    max_consecutive: int = Field(1, ge=1, description="Hits in a row; a full step lets the solver's corrector repair.")
    min_anchors: int = Field(2, ge=1, le=2, description="Full steps of this request before its first hit.")

    @property
    def first(self) -> int:
        """The first step that may reuse: all steps before the first hit are full, so its index counts its anchors."""
        return max(self.warmup_steps, self.min_anchors)

    def end(self, steps: int) -> int:
        """One past the last step that may reuse."""
        return steps - self.cooldown_steps

    def check(self, schedule: Schedule) -> None:
        """Raise ScheduleError naming the first hit that these limits forbid."""
        run, previous = 0, -2
        for hit in schedule.reuse:
            if not self.first <= hit < self.end(schedule.steps):
                raise ScheduleError(
                    f"reuse: step {hit} of {schedule.steps} is outside [{self.first}, {self.end(schedule.steps)}): "
                    f"warmup_steps {self.warmup_steps}, min_anchors {self.min_anchors}, "
                    f"cooldown_steps {self.cooldown_steps}"
                )
            run = run + 1 if hit == previous + 1 else 1
            previous = hit
            if run > self.max_consecutive:
                raise ScheduleError(
                    f"reuse: step {hit} is hit number {run} in a row, max_consecutive is {self.max_consecutive}"
                )


class Planned(NamedTuple):
    """A schedule, and the steps the range guard made full."""

    schedule: Schedule
    out_of_range: tuple[int, ...]


class StageRule(NamedTuple):
    """One stage's map from signal change to expected residual change."""

    coefficients: Coefficients
    input_range: tuple[float, float] | None
    """Calibrated range of d, both ends included; None leaves the range unguarded, as the official rule does."""


def polynomial(coefficients: Sequence[float], x: float) -> float:
    """Value at ``x``, highest power first (Horner); the arithmetic of numpy.poly1d in double precision."""
    value = 0.0
    for coefficient in coefficients:
        value = value * x + coefficient
    return value


def teacache_schedule(
    changes: Sequence[float], rules: Sequence[StageRule], threshold: float, limits: SkipLimits, clamp: bool = True
) -> Planned:
    """The TeaCache rule of this module's docstring.

    changes: d_1 .. d_(steps-1), one fewer than there are steps.  rules: one a stage.  threshold: accumulated relative
    change, no unit; 0 reuses nothing when ``clamp``.  clamp False is the official rule (negative values lower A).
    """
    if any(not math.isfinite(change) or change < 0 for change in changes):
        raise ScheduleError(f"changes: got {list(changes)}, expected finite values of at least 0")
    tracks = [_TeaCacheTrack(changes, rule, threshold, clamp) for rule in rules]
    return _combine(len(changes) + 1, tracks, limits)


def magcache_schedule(ratios: Sequence[Sequence[float]], threshold: float, limits: SkipLimits) -> Planned:
    """The MagCache rule: err += |1 - R|, R the product of magnitude ratios since the last full step; reuse while
    err <= threshold.  Its K is ``limits.max_consecutive``, its retention ``limits.warmup_steps``.

    ratios: a list for each (stage, branch), entry i = |r_i| / |r_(i-1)|, entry 0 unused; lengths equal the steps.
    Source: diffusers 0.42.1 hooks/mag_cache.py `MagCacheHeadHook.new_forward`.
    """
    lengths = {len(track) for track in ratios}
    if len(lengths) != 1:
        raise ScheduleError(f"ratios: got lists of lengths {sorted(lengths)}, expected one or more of equal length")
    return _combine(lengths.pop(), [_MagCacheTrack(track, threshold) for track in ratios], limits)


class _Track(Protocol):
    """One accumulator.  `advance` is called once for each step that is not forced, in order."""

    def in_range(self, step: int) -> bool: ...
    def advance(self, step: int) -> bool: ...
    def reset(self) -> None: ...


class _TeaCacheTrack:
    def __init__(self, changes: Sequence[float], rule: StageRule, threshold: float, clamp: bool) -> None:
        self._changes, self._rule, self._threshold, self._clamp = changes, rule, threshold, clamp
        self._sum = 0.0

    def in_range(self, step: int) -> bool:
        if self._rule.input_range is None:
            return True
        low, high = self._rule.input_range
        return low <= self._changes[step - 1] <= high

    def advance(self, step: int) -> bool:
        expected = polynomial(self._rule.coefficients, self._changes[step - 1])
        self._sum += max(expected, 0.0) if self._clamp else expected
        return self._sum < self._threshold

    def reset(self) -> None:
        self._sum = 0.0


class _MagCacheTrack:
    def __init__(self, ratios: Sequence[float], threshold: float) -> None:
        self._ratios, self._threshold = ratios, threshold
        self.reset()

    def in_range(self, step: int) -> bool:
        return True

    def advance(self, step: int) -> bool:
        self._ratio *= self._ratios[step]
        self._error += abs(1.0 - self._ratio)
        return self._error <= self._threshold

    def reset(self) -> None:
        self._ratio, self._error = 1.0, 0.0


def _combine(steps: int, tracks: Sequence[_Track], limits: SkipLimits) -> Planned:
    if not tracks:
        raise ScheduleError("rules: got none, expected one a stage")
    reuse: list[int] = []
    out_of_range: list[int] = []
    run = 0
    for step in range(steps):
        hit = False
        if limits.first <= step < limits.end(steps):
            if all(track.in_range(step) for track in tracks):
                # The first objection decides: a full step clears every track, so the others need not advance.
                hit = all(track.advance(step) for track in tracks) and run < limits.max_consecutive
            else:
                out_of_range.append(step)
        run = run + 1 if hit else 0
        if hit:
            reuse.append(step)
        else:
            for track in tracks:
                track.reset()
    return Planned(Schedule(steps, tuple(reuse)), tuple(out_of_range))
