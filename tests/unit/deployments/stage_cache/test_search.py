"""The choice is exact: brute force over all subsets agrees."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.stage_cache.search import (
    candidates,
    check_additive,
    choose,
    hits_needed,
    improve,
    predicted_error,
    random_schedule,
    swaps,
)
from deployments.stage_cache.skip_schedule import Schedule, ScheduleError, SkipLimits

SMALL = SkipLimits(warmup_steps=2, cooldown_steps=1, max_consecutive=1, min_anchors=2)


def brute_force(
    steps: int, hits: int, sensitivity: dict[int, float], limits: SkipLimits
) -> tuple[float, tuple[int, ...]] | None:
    best: tuple[float, tuple[int, ...]] | None = None
    for reuse in itertools.combinations(sorted(sensitivity), hits):
        try:
            limits.check(Schedule(steps, reuse))
        except ScheduleError:
            continue
        cost = 0.0
        for hit in reuse:
            cost += sensitivity[hit] ** 2
        if best is None or (cost, reuse) < best:
            best = (cost, reuse)
    return best


@settings(max_examples=60, deadline=None)
@given(
    values=st.lists(st.floats(0.001, 1.0), min_size=12, max_size=12),
    missing=st.sets(st.integers(0, 11), max_size=4),
    hits=st.integers(0, 5),
    limits=st.builds(
        SkipLimits,
        warmup_steps=st.integers(1, 4),
        cooldown_steps=st.integers(0, 3),
        max_consecutive=st.integers(1, 2),
        min_anchors=st.integers(1, 2),
    ),
)
def test_choose_equals_brute_force(values: list[float], missing: set[int], hits: int, limits: SkipLimits) -> None:
    sensitivity = {step: value for step, value in enumerate(values) if step not in missing and step > 0}
    expected = brute_force(12, hits, sensitivity, limits)
    if expected is None:
        with pytest.raises(ScheduleError, match="do not fit"):
            choose(12, hits, sensitivity, limits)
    else:
        assert choose(12, hits, sensitivity, limits).reuse == expected[1]


def test_choose_takes_the_quiet_middle() -> None:
    """50 steps, loud ends: the hits end up in the middle, never two in a row."""
    sensitivity = {step: abs(step - 24) / 24 + 0.01 for step in range(6, 42)}
    assert choose(50, 9, sensitivity, SkipLimits()).reuse == (16, 18, 20, 22, 24, 26, 28, 30, 32)


def test_choose_minimises_squares() -> None:
    """.3 + .3 is more than .05 + .5, and .18 less than .2525."""
    assert choose(9, 2, {2: 0.3, 3: 0.05, 4: 0.3, 5: 0.5}, SMALL).reuse == (2, 4)


@pytest.mark.parametrize(
    ("share", "cost", "hits"), [(0.9, 0.02, 6), (0.9, 0.05, 6), (0.8, 0.02, 7), (0.8, 0.05, 7), (0.7, 0.05, 8)]
)
def test_hits_needed_for_the_latency_gate(share: float, cost: float, hits: int) -> None:
    """`share` of a request denoises, a hit costs `cost` of a full step, 50 steps, ratio .90; worked out by hand."""
    assert hits_needed(0.90, share, cost, 50) == hits


def test_hits_needed_edges() -> None:
    assert hits_needed(1.0, 0.9, 0.02, 50) == 0
    assert hits_needed(0.9, 0.5, 0.0, 50) == 10  # exactly .2: no rounding up to 11
    with pytest.raises(ScheduleError, match="of 50 steps"):
        hits_needed(0.5, 0.4, 0.0, 50)


def test_errors_add_in_squares() -> None:
    assert predicted_error(Schedule(10, (3, 5)), {3: 0.3, 5: 0.4}) == pytest.approx(0.5)
    assert predicted_error(Schedule(10), {}) == 0.0


def test_swaps_are_all_allowed_neighbours_in_order() -> None:
    sensitivity = {step: step / 10 for step in range(2, 8)}
    got = [schedule.reuse for schedule in swaps(Schedule(9, (3, 6)), sensitivity, SMALL)]
    # 3 moves to 2 or 4; 6 moves to 5 or 7 (2 + 3 and 4 + 3 are adjacent); 5 next to 6 and 7 next to 6 are not allowed
    assert got == [(3, 5), (2, 6), (4, 6), (3, 7)]  # squares .34, .40, .52, .58


def test_improve_finds_what_the_model_misses() -> None:
    """The true error punishes step 3, which the sensitivities praise; swaps leave it."""
    sensitivity = {step: 0.1 + step / 100 for step in range(2, 8)}
    seen: list[Schedule] = []

    def judge(schedule: Schedule) -> float:
        seen.append(schedule)
        return predicted_error(schedule, sensitivity) + (1.0 if 2 in schedule.reuse else 0.0)

    start = choose(9, 2, sensitivity, SMALL)
    assert start.reuse == (2, 4)
    best, error = improve(start, judge, sensitivity, SMALL, trials=50)
    assert best.reuse == (3, 5)
    assert error == pytest.approx(predicted_error(best, sensitivity))
    assert len(seen) == len(set(seen))


def test_improve_stops_at_its_budget() -> None:
    sensitivity = dict.fromkeys(range(2, 8), 0.1)
    seen: list[Schedule] = []
    improve(Schedule(9, (2, 4)), lambda s: seen.append(s) or 1.0, sensitivity, SMALL, trials=3)  # type: ignore[func-returns-value]
    assert len(seen) == 3


def test_random_schedules_obey_and_vary() -> None:
    rng = random.Random(0)
    drawn = {random_schedule(50, 9, SkipLimits(), rng) for _ in range(20)}
    for schedule in drawn:
        SkipLimits().check(schedule)
        assert len(schedule.reuse) == 9
    assert len(drawn) > 15


def test_candidates_are_the_free_steps() -> None:
    assert candidates(50, SkipLimits()) == range(6, 42)
    assert len(candidates(10, SkipLimits())) == 0


def test_additive_check() -> None:
    sensitivity = {step: step / 10 for step in range(2, 8)}
    schedules = [Schedule(9, (a, b)) for a, b in ((2, 4), (3, 5), (4, 6), (5, 7))]
    twice = {schedule: 2 * predicted_error(schedule, sensitivity) for schedule in schedules}
    check = check_additive(sensitivity, twice)
    assert check.rank_correlation == pytest.approx(1.0)
    assert check.median_ratio == pytest.approx(2.0)
    backwards = dict(zip(schedules, reversed(twice.values()), strict=True))
    assert check_additive(sensitivity, backwards).rank_correlation == pytest.approx(-1.0)
    with pytest.raises(ValueError, match="at least 3"):
        check_additive(sensitivity, {})
