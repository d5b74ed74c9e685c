"""The step cache of one stage: keeps residuals at full steps, predicts them at hits, and watches itself.

    admit ─> run, run, ... (every step of every branch) ─> drop       at the end, failure or cancel

`run` fits the seam of a stage (input, block stack) -> output, so native and cached requests share one forward: the
embedding, the transport and the head around it are the same.  A full step of a cached request differs from a native one
by a subtraction, and only where a later hit needs the residual; a request with no hits is not admitted at all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from deployments.plan import BRANCHES, Branch
from deployments.stage_cache.anchors import AnchorStore
from deployments.stage_cache.closed import checked_branch
from deployments.stage_cache.guard import LAG_STEPS, ErrorFeedback, GuardTrip
from deployments.stage_cache.native_reason import NativeReason
from deployments.stage_cache.predictor import Predictor, apply, residual
from deployments.stage_cache.skip_schedule import Schedule

Blocks = Callable[[Tensor], Tensor]
ErrorLimits = dict[tuple[Branch, int], float]
"""Largest allowed |r - r^| / |r| by branch and full step; steps without a limit are not checked."""


@dataclass
class _Request:
    schedule: Schedule
    sigmas: tuple[float, ...]
    anchors: frozenset[int]
    checks: frozenset[tuple[Branch, int]]
    feedback: ErrorFeedback
    full: Counter[Branch] = field(default_factory=Counter)
    reused: Counter[Branch] = field(default_factory=Counter)


@dataclass(frozen=True)
class StageReport:
    """Steps of one request on one stage, by branch: host counters, no device value."""

    full: dict[Branch, int]
    reused: dict[Branch, int]


class StepCache:
    """predictor, error_limits: this stage's, from the profile.  anchors: the rank's store, shared by all its stages."""

    def __init__(
        self,
        predictor: Predictor,
        anchors: AnchorStore,
        device: torch.device,
        error_limits: ErrorLimits | None = None,
        lag: int = LAG_STEPS,
    ) -> None:
        self._predictor, self._anchors, self._device, self._lag = predictor, anchors, device, lag
        self._limits = error_limits or {}
        self._requests: dict[int, _Request] = {}

    def admit(
        self,
        request: int,
        schedule: Schedule,
        sigmas: Sequence[float],
        hidden_bytes: int,
        branches: Sequence[Branch] = BRANCHES,
        start: int = 0,
    ) -> NativeReason | None:
        """Prepare a request, or say why this rank cannot hold its residuals: then every rank has to run it native.

        sigmas: the solver's, at least one a step.  hidden_bytes: of one hidden state [1, T, D] in the model's dtype.
        branches: those that this rank computes.  start: the first step that is run, after a resume; residuals from
        before it do not exist.
        """
        count = self._predictor.anchors
        for hit in schedule.reuse:  # fail here, not in the middle of a request
            for branch in branches:
                self._predictor.weights(checked_branch(branch), hit, schedule.anchors(hit, count), sigmas)
        checks = self._checks(schedule, count, start)
        for branch, step in checks:
            self._predictor.weights(branch, step, schedule.anchors(step, count), sigmas)
        refused = self._anchors.reserve(request, hidden_bytes * count * len(branches))
        if refused is not None:
            return refused
        wanted = schedule.anchor_steps(count) | {
            anchor for _, step in checks for anchor in schedule.anchors(step, count)
        }
        feedback = ErrorFeedback(self._device, self._lag)
        self._requests[request] = _Request(schedule, tuple(sigmas), wanted, checks, feedback)
        return None

    def run(self, request: int, branch: Branch, step: int, hidden: Tensor, blocks: Blocks) -> Tensor:
        """The stage's output hidden state for one step of one branch; a hit does not call ``blocks``.

        hidden: [1, T, D], model dtype, not changed.
        """
        state, branch = self._admitted(request), checked_branch(branch)
        used = state.schedule.anchors(step, self._predictor.anchors)
        if state.schedule.reuses(step):
            weights = self._predictor.weights(branch, step, used, state.sigmas)
            output = apply(hidden, self._anchors.get(request, branch, used), weights)
            state.reused[branch] += 1
            return output
        output = blocks(hidden)
        state.full[branch] += 1
        checked = (branch, step) in state.checks
        if checked or step in state.anchors:
            added = residual(hidden, output)
            if checked:
                kept = self._anchors.get(request, branch, used)
                weights = self._predictor.weights(branch, step, used, state.sigmas)
                state.feedback.check(branch, step, self._limits[branch, step], added, kept, weights)
            if step in state.anchors:
                self._anchors.keep(request, branch, step, added, self._predictor.anchors)
        return output

    def trip(self, request: int, step: int) -> GuardTrip | None:
        """Before ``step``: a guard trip that has become known, to be reported to the other ranks.  Does not wait."""
        return self._admitted(request).feedback.poll(step)

    def veto(self, request: int, step: int) -> None:
        """Run the request full from ``step`` on; every rank is told the same step."""
        state = self._admitted(request)
        state.schedule = state.schedule.until(step)
        state.anchors = frozenset(anchor for anchor in state.anchors if anchor < step)
        state.checks = frozenset(check for check in state.checks if check[1] < step)

    def report(self, request: int) -> StageReport:
        """Steps so far."""
        state = self._admitted(request)
        return StageReport(dict(state.full), dict(state.reused))

    def admitted(self, request: int) -> bool:
        """Whether the request is cached here; a native one calls its blocks itself."""
        return request in self._requests

    def drop(self, request: int) -> None:
        """Forget a request and free its residuals.  Ids that were not admitted are no error."""
        self._requests.pop(request, None)
        self._anchors.drop(request)

    def _checks(self, schedule: Schedule, count: int, start: int) -> frozenset[tuple[Branch, int]]:
        """Checks that can still change something: full steps with enough anchors and a hit at least a lag later."""
        last = schedule.reuse[-1] if schedule.reuse else -1

        def possible(branch: Branch, step: int) -> bool:
            anchors = schedule.anchors(step, count)
            if not start:
                return len(anchors) == count
            # A resumed schedule has fewer hits than the one that the limits were measured on, and other anchors.
            return len(anchors) == count and min(anchors) >= start and self._predictor.covers(branch, step, anchors)

        return frozenset(
            (branch, step)
            for branch, step in self._limits
            if not schedule.reuses(step) and step + self._lag < last and possible(branch, step)
        )

    def _admitted(self, request: int) -> _Request:
        state = self._requests.get(request)
        if state is None:
            raise KeyError(f"request {request}: not admitted to the step cache; call its blocks directly")
        return state
