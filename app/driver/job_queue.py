"""The jobs of one model: who runs, who waits, and for how long."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import islice

from app.api.errors import QueueFull
from app.driver.live_job import LiveJob

FIRST_RETRY_S = 5.0
"""Told to a refused client while nothing is known of the model's speed."""


class JobQueue:
    """First come, first served, `capacity` at a time.

    start: called with a job whose turn it is, on the caller's stack; `done` gives its place back.
    """

    def __init__(self, model: str, capacity: int, max_queued: int, start: Callable[[LiveJob], None]) -> None:
        self._model, self._capacity, self._max_queued, self._start = model, capacity, max_queued, start
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
        while self._waiting and len(self._running) < self._capacity:
            live = self._waiting.popleft()
            self._running.add(live)
            self._start(live)
            moved = True
        if moved:
            self._tell_positions()

    def _tell_positions(self) -> None:
        for live in self._waiting:
            live.announce()
