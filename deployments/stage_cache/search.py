"""Choosing which steps to reuse from measured sensitivities.

Model: the temporal error of a schedule is additive in squares, TE^2 = sum S_i^2, where S_i is the error when step i
alone is reused.  It is a hypothesis: `check_additive` holds it against measured schedules.  The choice under the limits
is exact (dynamic programming), so any disagreement is the model's; swaps judged by true errors repair it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from deployments.stage_cache.skip_schedule import Schedule, ScheduleError, SkipLimits


def candidates(steps: int, limits: SkipLimits) -> range:
    """The steps that may reuse at all: those whose sensitivity is worth measuring."""
    return range(limits.first, max(limits.first, limits.end(steps)))


def hits_needed(ratio: float, denoiser_share: float, hit_cost: float, steps: int) -> int:
    """Fewest hits with 1 - f h (1 - c) <= ratio; ScheduleError if even reusing every step is too slow.

    denoiser_share f: of the native request's time; hit_cost c: of a full step's.  f .9, c .02, 50 steps: 6 for .90.
    """
    gain = denoiser_share * (1.0 - hit_cost)
    hits = math.ceil(steps * (1.0 - ratio) / gain - 1e-9) if gain > 0 else steps + 1
    if hits > steps:
        raise ScheduleError(
            f"ratio: {ratio} needs {hits} of {steps} steps at denoiser share {denoiser_share}, hit cost {hit_cost}"
        )
    return max(hits, 0)


def predicted_error(schedule: Schedule, sensitivity: Mapping[int, float]) -> float:
    """sqrt(sum S_i^2) over the schedule's hits."""
    return math.sqrt(math.fsum(sensitivity[hit] ** 2 for hit in schedule.reuse))


def choose(steps: int, hits: int, sensitivity: Mapping[int, float], limits: SkipLimits) -> Schedule:
    """The schedule with exactly ``hits`` hits that `predicted_error` likes best; ties go to the earlier steps.

    sensitivity: S_i; a step without one is never reused.  ScheduleError when the limits leave no such schedule.
    """
    # best[(hits so far, hits in a row up to here)] = (sum of squares, their steps), step by step.
    best: dict[tuple[int, int], tuple[float, tuple[int, ...]]] = {(0, 0): (0.0, ())}
    for step in candidates(steps, limits):
        after: dict[tuple[int, int], tuple[float, tuple[int, ...]]] = {}
        for (count, run), (cost, chosen) in best.items():
            options = [((count, 0), (cost, chosen))]
            if step in sensitivity and count < hits and run < limits.max_consecutive:
                options.append(((count + 1, run + 1), (cost + sensitivity[step] ** 2, (*chosen, step))))
            for key, value in options:
                if key not in after or value < after[key]:
                    after[key] = value
        best = after
    ends = [value for (count, _), value in best.items() if count == hits]
    if not ends:
        raise ScheduleError(
            f"hits: {hits} do not fit into steps {limits.first} to {limits.end(steps) - 1} with at most "
            f"{limits.max_consecutive} in a row; ask for fewer, or measure more steps ({len(sensitivity)} are)"
        )
    return Schedule(steps, min(ends)[1])


def swaps(schedule: Schedule, sensitivity: Mapping[int, float], limits: SkipLimits) -> Iterator[Schedule]:
    """All allowed schedules that move exactly one hit, best predicted first."""
    moved: list[tuple[float, tuple[int, ...]]] = []
    for hit in schedule.reuse:
        for step in sensitivity.keys() - set(schedule.reuse):
            other = Schedule(schedule.steps, tuple(sorted({*schedule.reuse, step} - {hit})))
            try:
                limits.check(other)
            except ScheduleError:
                continue
            moved.append((predicted_error(other, sensitivity), other.reuse))
    for _, reuse in sorted(moved):
        yield Schedule(schedule.steps, reuse)


def improve(
    schedule: Schedule,
    judge: Callable[[Schedule], float],
    sensitivity: Mapping[int, float],
    limits: SkipLimits,
    trials: int,
) -> tuple[Schedule, float]:
    """Greedy swaps by true error: take the first better neighbour, and begin again, for at most ``trials`` judgements.

    judge: measured temporal error, lower is better; no schedule is judged twice.  Returns the best and its error.
    """
    judged = {schedule: judge(schedule)}
    best = schedule
    while True:
        for other in swaps(best, sensitivity, limits):
            if len(judged) >= trials:
                return best, judged[best]
            if other in judged:
                continue
            judged[other] = judge(other)
            if judged[other] < judged[best]:
                best = other
                break
        else:
            return best, judged[best]


def random_schedule(steps: int, hits: int, limits: SkipLimits, rng: random.Random) -> Schedule:
    """A random allowed schedule, for checking the additive model; every hit set can come up."""
    weights = {step: rng.random() for step in candidates(steps, limits)}
    return choose(steps, hits, weights, limits)


@dataclass(frozen=True)
class AdditiveCheck:
    """How the additive model fares on measured schedules."""

    rank_correlation: float
    """Spearman's, of predicted and measured; 1 means the model orders schedules as the videos do."""
    median_ratio: float
    """Measured over predicted: above 1 errors add up worse than in squares."""


def check_additive(sensitivity: Mapping[int, float], measured: Mapping[Schedule, float]) -> AdditiveCheck:
    """measured: true temporal error of at least three schedules, usually 20 random ones."""
    if len(measured) < 3:
        raise ValueError(f"measured: got {len(measured)} schedules, expected at least 3")
    predicted = np.array([predicted_error(schedule, sensitivity) for schedule in measured])
    true = np.array(list(measured.values()))
    correlation = np.corrcoef(_ranks(predicted), _ranks(true))[0, 1]
    return AdditiveCheck(float(correlation), float(np.median(true / predicted)))


def _ranks(values: np.ndarray[tuple[int], np.dtype[np.float64]]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Ranks from 0, equal values share their mean rank."""
    _, group, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    ranks: np.ndarray[tuple[int], np.dtype[np.float64]] = (ends - (counts + 1) / 2.0)[group]
    return ranks
