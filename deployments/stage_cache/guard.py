"""Lagged error feedback: full steps tell afterwards how good a prediction would have been, and nobody waits for it.

    full step i     e_i = |r_i - r^_i| / |r_i|  on a side stream, then a copy to pinned host memory, then an event
    step i + lag    if the event has passed: e_i above its limit, or not finite, trips the request

A trip is a request for a veto: the stage reports it on a message that exists anyway, and all ranks run the request full
from the step named there.  On a CPU e_i is known at once, but it is looked at with the same lag, so that the same
request trips at the same step on every device whose host is at most ``lag`` steps ahead; a host further ahead sees the
trip later, never not at all.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from deployments.plan import Branch
from deployments.stage_cache.predictor import prediction_error

LAG_STEPS = 2
"""A gang's host works at most one step ahead of its device, so after two steps the value is on the host."""


@dataclass(frozen=True)
class GuardTrip:
    """A prediction that missed."""

    step: int
    """The full step that was checked; the veto holds from a later one."""
    branch: Branch
    reason: Literal["error_limit", "nonfinite"]
    error: float
    """|r - r^| / |r|, NaN or infinite with reason ``nonfinite``."""
    limit: float


@dataclass
class _Pending:
    step: int
    branch: Branch
    limit: float
    value: Tensor
    """[] fp32 in host memory, valid once ``done`` has passed."""
    done: torch.cuda.Event | None


class ErrorFeedback:
    """The checks of one request on one stage, in the order of its steps."""

    def __init__(self, device: torch.device, lag: int = LAG_STEPS) -> None:
        if lag < 1:
            raise ValueError(f"lag: got {lag}, expected at least 1: a value of this step would have to be waited for")
        self._lag = lag
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._pending: deque[_Pending] = deque()
        self._pinned: list[Tensor] = []
        """Host scalars free for use; allocating pinned memory anew could wait for the device."""

    def check(
        self,
        branch: Branch,
        step: int,
        limit: float,
        actual: Tensor,
        residuals: Sequence[Tensor],
        weights: Sequence[float],
    ) -> None:
        """Queue the comparison of a full step's residual with its prediction.  Does not wait.

        actual, residuals: [1, T, D] on the device; they must not be written to later.  limit: largest allowed e.
        """
        if self._side is None:
            self._pending.append(_Pending(step, branch, limit, prediction_error(actual, residuals, weights), None))
            return
        self._side.wait_stream(torch.cuda.current_stream(actual.device))
        with torch.cuda.stream(self._side):
            error = prediction_error(actual, residuals, weights)
            value = self._pinned.pop() if self._pinned else torch.empty((), pin_memory=True)
            value.copy_(error, non_blocking=True)
            done = torch.cuda.Event()
            done.record(self._side)
        for tensor in (actual, *residuals):
            tensor.record_stream(
                self._side
            )  # the allocator must not hand their memory out before the side stream read it
        self._pending.append(_Pending(step, branch, limit, value, done))

    def poll(self, step: int) -> GuardTrip | None:
        """The first trip among the checks of steps up to ``step - lag`` that the device has finished, else None."""
        trip: GuardTrip | None = None
        while self._pending and self._pending[0].step + self._lag <= step:
            pending = self._pending[0]
            if pending.done is not None and not pending.done.query():
                break
            self._pending.popleft()
            error = float(pending.value)  # host memory: no wait
            if pending.done is not None:
                self._pinned.append(pending.value)
            if trip is None and not error <= pending.limit:
                reason: Literal["error_limit", "nonfinite"] = "error_limit" if math.isfinite(error) else "nonfinite"
                trip = GuardTrip(pending.step, pending.branch, reason, error, pending.limit)
        return trip
