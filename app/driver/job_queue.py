"""The jobs of one model: who runs, who waits, and for how long."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import islice

from app.api.errors import QueueFull
from app.driver.job_state import VideoParams
from app.driver.live_job import LiveJob

FIRST_RETRY_S = 5.0
"""Told to a refused client while nothing is known of the model's speed."""


class JobQueue:
    """First come, first served, `capacity` at a time; of twins only one at a time, as the second will find its result.

    start: called with a job whose turn it is, on the caller's stack; `done` gives its place back.
    twin_key: equal for jobs that are twins, None for one that has none; `release` lets the next of them run.
    """

    def __init__(
        self,
        model: str,
        capacity: int,
        max_queued: int,
        start: Callable[[LiveJob], None],
        twin_key: Callable[[VideoParams], str | None] = lambda params: None,
    ) -> None:
        self._model, self._capacity, self._max_queued, self._start = model, capacity, max_queued, start
        self._twin_key = twin_key
        self._taken: dict[str, LiveJob] = {}
        """Jobs that their twins wait for."""
        self._running: set[LiveJob] = set()
        self._waiting: deque[LiveJob] = deque()
        self._promised = 0

    def promise(self) -> None:
        """Keep a place for a job that is being written to the table.  Raises QueueFull."""
        waiting = len(self._waiting) + self._promised
        if waiting - (self._capacity - len(self._running)) >= self._max_queued:
            raise QueueFull(
                f"model {self._model}: {waiting} jobs wait, as many as jobs.max_queued allows",
                retry_after_s=self._next_place_s(),
            )
        self._promised += 1

    def withdraw(self) -> None:
        """Give a promised place back."""
        self._promised -= 1

    def add(self, live: LiveJob) -> None:
        """A job that may run from now on."""
        self._waiting.append(live)
        self._fill()

    def remove(self, live: LiveJob) -> bool:
        """Take a job out again; False when it runs already."""
        if live not in self._waiting:
            return False
        self._waiting.remove(live)
        self._tell_positions()
        return True

    def done(self, live: LiveJob) -> None:
        """A job that was started no longer needs its place."""
        self._running.discard(live)
        self._fill()

    def release(self, live: LiveJob) -> None:
        """A job has left its result, or none: a twin may run."""
        key = self._twin_key(live.job.params)
        if key is not None and self._taken.get(key) is live:
            del self._taken[key]
            self._fill()

    @property
    def idle(self) -> bool:
        """Whether nobody waits."""
        return not self._waiting

    def position(self, live: LiveJob) -> int | None:
        """1 = next; None for a job that does not wait."""
        return self._waiting.index(live) + 1 if live in self._waiting else None

    def wait_s(self, live: LiveJob) -> float:
        """Expected seconds until a waiting job runs; 0 once it does."""
        position = self.position(live)
        if position is None:
            return 0.0
        ahead = [*self._running, *islice(self._waiting, position - 1)]
        return sum(other.progress.eta_s() or 0.0 for other in ahead) / self._capacity

    def _next_place_s(self) -> float:
        running = [live.progress.eta_s() for live in self._running]
        return min((eta for eta in running if eta is not None), default=FIRST_RETRY_S)

    def _fill(self) -> None:
        moved = False
        while len(self._running) < self._capacity and (live := self._next()) is not None:
            self._waiting.remove(live)
            self._running.add(live)
            self._start(live)
            moved = True
        if moved:
            self._tell_positions()

    def _next(self) -> LiveJob | None:
        for live in self._waiting:
            key = self._twin_key(live.job.params)
            if key is None:
                return live
            if key not in self._taken:
                self._taken[key] = live
                return live
        return None

    def _tell_positions(self) -> None:
        for live in self._waiting:
            live.announce()
