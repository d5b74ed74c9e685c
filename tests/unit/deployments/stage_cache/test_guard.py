"""The verdict comes late, never early, and never not at all."""

from __future__ import annotations

import math

import pytest
import torch

from deployments.stage_cache.guard import ErrorFeedback, GuardTrip

CPU = torch.device("cpu")


def check(feedback: ErrorFeedback, step: int, error: float, limit: float = 0.5, device: torch.device = CPU) -> None:
    """Queue a check whose |r - r^| / |r| is `error`: r = 1, r^ = 1 - error."""
    r, kept = torch.ones(1, 1, 1, device=device), torch.full((1, 1, 1), 1.0 - error, device=device)
    feedback.check("positive", step, limit, r, (kept,), (1.0,))


def test_trips_exactly_the_lag_later() -> None:
    feedback = ErrorFeedback(CPU, lag=2)
    check(feedback, 10, 0.75)
    assert feedback.poll(10) is None
    assert feedback.poll(11) is None
    assert feedback.poll(12) == GuardTrip(10, "positive", "error_limit", 0.75, 0.5)
    assert feedback.poll(13) is None  # told once


def test_an_error_at_its_limit_passes() -> None:
    feedback = ErrorFeedback(CPU, lag=1)
    check(feedback, 10, 0.5)
    assert feedback.poll(11) is None


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_non_finite_error_trips(bad: float) -> None:
    feedback = ErrorFeedback(CPU, lag=1)
    check(feedback, 10, bad)
    trip = feedback.poll(11)
    assert trip is not None
    assert trip.reason == "nonfinite"


def test_a_zero_residual_trips() -> None:
    """0 / 0: a stage that adds nothing is broken, or was never run."""
    feedback = ErrorFeedback(CPU, lag=1)
    feedback.check("negative", 3, 0.5, torch.zeros(1, 1, 1), (torch.zeros(1, 1, 1),), (1.0,))
    trip = feedback.poll(4)
    assert trip is not None
    assert (trip.branch, trip.reason) == ("negative", "nonfinite")


def test_the_first_trip_is_told_and_later_checks_wait_for_their_step() -> None:
    feedback = ErrorFeedback(CPU, lag=1)
    for step, error in ((10, 0.1), (11, 0.7), (12, 0.9)):
        check(feedback, step, error)
    trip = feedback.poll(12)
    assert trip is not None
    assert trip.step == 11
    trip = feedback.poll(13)
    assert trip is not None
    assert trip.step == 12


def test_a_lag_of_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="lag: got 0"):
        ErrorFeedback(CPU, lag=0)


@pytest.mark.gpu
def test_cuda_gives_the_same_verdict_without_a_sync() -> None:
    """Check 31, the guard's part: sync debug mode turns any wait into an error."""
    device = torch.device("cuda")
    feedback = ErrorFeedback(device, lag=2)
    check(feedback, 0, 0.0, device=device)  # the first pinned allocation and kernel loads come before the loop
    torch.cuda.synchronize()
    feedback.poll(2)
    torch.cuda.set_sync_debug_mode("error")
    try:
        r, kept = torch.ones(1, 64, 64, device=device), torch.full((1, 64, 64), 0.25, device=device)
        feedback.check("positive", 10, 0.5, r, (kept,), (1.0,))
        assert feedback.poll(11) is None
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        trip = feedback.poll(12)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert trip == GuardTrip(10, "positive", "error_limit", 0.75, 0.5)


@pytest.mark.gpu
def test_cuda_an_unfinished_check_is_told_later() -> None:
    """A host far ahead of its device polls again; the trip is not lost."""
    device = torch.device("cuda")
    feedback = ErrorFeedback(device, lag=1)
    check(feedback, 0, 0.0, device=device)  # kernel loads and the pinned allocation would wait behind the sleep below
    torch.cuda.synchronize()
    feedback.poll(1)
    torch.cuda._sleep(200_000_000)  # about .1 s of device work in front of the check
    check(feedback, 10, 0.75, device=device)
    assert feedback.poll(11) is None
    torch.cuda.synchronize()
    trip = feedback.poll(12)
    assert trip is not None
    assert trip.step == 10
