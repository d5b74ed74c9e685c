"""Rank 0's loop and the other ranks' loop.

Only rank 0 admits requests and chooses the order; it announces each step before it runs its own part, and every rank
runs the announced steps in that order, so no collective is needed to agree.  Requests take turns: while one request's
latents are on their way through the stages, another's next step enters.

    submit ──> waiting ──> open ──> (announce, run) ... collect ... ──> result ──> Close
    cancel: the request gets no further step; the one in flight is collected, then Close goes out
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from deployments.gang.control import Announcer, ControlChannel
from deployments.gang.messages import Close, Open, Run, Stop


@dataclass(frozen=True)
class Result:
    """What a finished request gives."""

    latents: Tensor
    """On the CPU."""
    ranks: list[dict[str, Any]]
    """What each rank did, as plain data; the worker knows its fields."""
    saved: Future[None] | None = None
    """Done once the latents are stored: no loss of a process asks for them again.  None where nobody stores them."""


class Worker(Protocol):
    """One rank's part of the work.  Called on one thread only."""

    def open(self, request: int, spec: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Prepare a request."""

    def vetoed(self, request: int) -> bool:
        """Rank 0: whether any rank has asked for the rest of the request without the step cache.  Does not wait."""

    def run(self, request: int, position: int, digest: int, native: bool) -> None:
        """This rank's part of one step; native: as in `Run`."""

    def collect(self, request: int, position: int) -> None:
        """Rank 0: wait until the step's outcome is back."""

    def result(self, request: int) -> Result:
        """Rank 0: the outcome of the last step."""

    def close(self, request: int) -> None:
        """Drop the request's state."""


class Listener(Protocol):
    """Whoever asked for a request.  Called on the conductor's thread; must return at once and never raise."""

    def on_step(self, done: int) -> None:
        """Steps before the solver's step `done` have been computed, those before the plan's first included."""

    def on_result(self, result: Result, seconds: float) -> None:
        """The request is complete; seconds from its first step to its last."""

    def on_failure(self, error: BaseException) -> None:
        """The gang cannot go on; the request may be sent to another one."""


@dataclass
class Submission:
    """One request as the conductor is given it."""

    key: str
    """The caller's name for it; a second submission with the key of a living one takes over as its listener, and the
    first listener hears of a failure."""
    spec: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    start: int
    """The solver's step at which the plan begins."""
    steps: int
    """Steps of the plan."""
    digest: int
    """Of the plan."""
    listener: Listener


@dataclass
class _Active:
    submission: Submission
    request: int
    launched: int = 0
    collected: int = 0
    began: float = field(default_factory=time.perf_counter)
    cancelled: bool = False


class Conductor:
    """Rank 0.  `submit`, `cancel` and `stop` may be called from any thread; `run` is the device thread's loop."""

    def __init__(self, worker: Worker, announcer: Announcer, in_flight: int) -> None:
        self._worker, self._announcer, self._in_flight = worker, announcer, in_flight
        self._changed = threading.Condition()
        self._waiting: deque[Submission] = deque()
        self._cancels: list[tuple[str, Listener]] = []
        self._stopping = False
        self._active: dict[str, _Active] = {}
        self._numbers = 0
        self._failure: BaseException | None = None

    def submit(self, submission: Submission) -> None:
        """Queue a request; after a failure of the gang its listener hears of it at once."""
        with self._changed:
            failure = self._failure
            unheard = submission.listener
            if failure is None:
                living = self._living(submission.key)
                if living is None:
                    self._waiting.append(submission)
                else:
                    unheard, living.listener = living.listener, submission.listener
                    failure = RuntimeError(f"{submission.key}: another caller has taken over")
                self._changed.notify()
        if failure is not None:
            unheard.on_failure(failure)

    def cancel(self, key: str, listener: Listener) -> None:
        """Give a request no further step, unless another listener has taken it over."""
        with self._changed:
            self._cancels.append((key, listener))
            self._changed.notify()

    def _living(self, key: str) -> Submission | None:
        active = self._active.get(key)
        if active is not None and not active.cancelled:
            return active.submission
        return next((s for s in self._waiting if s.key == key), None)

    def stop(self) -> None:
        """End the loop after the step in flight; what is unfinished hears of a failure."""
        with self._changed:
            self._stopping = True
            self._changed.notify()

    def run(self) -> None:
        """The loop; returns after `stop`, raises what broke the gang after telling every listener."""
        in_flight: deque[_Active] = deque()
        try:
            while self._wait_for_work(bool(in_flight)):
                self._take_cancels(in_flight)
                self._admit()
                ready = self._next_ready(in_flight)
                if ready is not None:
                    self._launch(ready)
                    in_flight.append(ready)
                elif in_flight:
                    self._collect(in_flight.popleft())
            self._announcer.announce(Stop())
            self._fail(RuntimeError("the gang is shutting down"))
        except BaseException as error:
            self._fail(error)
            raise

    def _wait_for_work(self, busy: bool) -> bool:
        """Sleep while there is nothing to do; False once the loop shall end."""
        with self._changed:
            while not (busy or self._active or self._waiting or self._stopping):
                self._cancels.clear()  # of requests that have ended
                self._changed.wait()
            return not self._stopping or busy

    def _take_cancels(self, in_flight: deque[_Active]) -> None:
        with self._changed:
            cancels, self._cancels = self._cancels, []
            self._waiting = deque(s for s in self._waiting if (s.key, s.listener) not in cancels)
            hit = [a for key, a in self._active.items() if (key, a.submission.listener) in cancels and not a.cancelled]
        for active in hit:
            active.cancelled = True
            if active not in in_flight:
                self._close(active)

    def _admit(self) -> None:
        while True:
            with self._changed:
                if not self._waiting or len(self._active) >= self._in_flight:
                    return
                submission = self._waiting.popleft()
                if submission.key in self._active:  # its cancelled forerunner still has a step in flight
                    self._waiting.appendleft(submission)
                    return
                self._numbers += 1
                active = self._active[submission.key] = _Active(submission, self._numbers)
            opened = Open(active.request, submission.spec, submission.tensors)
            self._announcer.announce(opened)
            self._worker.open(opened.request, opened.spec, opened.tensors)
            submission.tensors = {}
            if submission.steps == 0:
                self._finish(active)

    def _next_ready(self, in_flight: deque[_Active]) -> _Active | None:
        """The request that has waited longest for its turn, none of whose steps is in flight."""
        if self._stopping:
            return None
        idle = [a for a in self._active.values() if a not in in_flight and not a.cancelled]
        return min(idle, key=lambda a: (a.launched, a.request), default=None)

    def _launch(self, active: _Active) -> None:
        step = Run(active.request, active.launched, active.submission.digest, self._worker.vetoed(active.request))
        self._announcer.announce(step)
        self._worker.run(step.request, step.position, step.digest, step.native)
        active.launched += 1

    def _collect(self, active: _Active) -> None:
        self._worker.collect(active.request, active.collected)
        active.collected += 1
        if active.cancelled:
            self._close(active)
            return
        active.submission.listener.on_step(active.submission.start + active.collected)
        if active.collected == active.submission.steps:
            self._finish(active)

    def _finish(self, active: _Active) -> None:
        result = self._worker.result(active.request)
        self._close(active)
        active.submission.listener.on_result(result, time.perf_counter() - active.began)

    def _close(self, active: _Active) -> None:
        with self._changed:
            self._active.pop(active.submission.key, None)
        self._announcer.announce(Close(active.request))
        self._worker.close(active.request)

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._failure = error
            listeners = [a.submission.listener for a in self._active.values()]
            listeners += [s.listener for s in self._waiting]
            self._active.clear()
            self._waiting.clear()
        for listener in listeners:
            listener.on_failure(error)


def follow(worker: Worker, channel: ControlChannel) -> None:
    """The loop of ranks 1..: run what rank 0 announces; returns after Stop, raises when rank 0 or a peer is lost."""
    while True:
        match channel.follow():
            case Open(request, spec, tensors):
                worker.open(request, spec, tensors)
            case Run(request, position, digest, native):
                worker.run(request, position, digest, native)
            case Close(request):
                worker.close(request)
            case Stop():
                return
