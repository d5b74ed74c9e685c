"""A job that is not final: its row, how far it is, and whoever waits for news of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Unpack

from app.driver.job_state import RUNNING, Job, JobState, JobView
from app.driver.job_store import JobChanges, JobStore
from app.driver.progress import Expectation, Progress
from cache_actors.latent_report import CacheReport


class LiveJob:
    """Belongs to one event loop.  The row is written first, memory follows it, then the news goes out.

    A job can have been taken up by another driver while this one was thought dead.  So every write names the attempt
    it is for, and raises JobTakenOver once another has begun.
    """

    def __init__(self, store: JobStore, job: Job, expected: Expectation | None) -> None:
        self._store = store
        self.job = job
        self.progress = Progress(expected, job.params.num_inference_steps)
        self._cancel_asked = False
        self.work: asyncio.Task[Any] | None = None
        """The attempt that runs now or ran last; cancelling it cancels the work wherever it is."""
        self.ended = False
        """The job is final, or no longer this driver's."""
        self.attempt_began = time.monotonic()
        self._news = asyncio.Event()
        self._queued_at = time.monotonic()
        # After a restart of the driver the wait is as long as the table can tell.
        self._waited = job.timings.get("queued", max(0.0, time.time() - job.created_at))

    @property
    def id(self) -> str:
        """The job's id."""
        return self.job.id

    def news(self) -> asyncio.Event:
        """Set on the next change after this call: taken before looking at the job, it misses none."""
        return self._news

    def cancel_asked(self) -> bool:
        """Whether the job's owner wants its end."""
        return self._cancel_asked

    def ask_cancel(self) -> None:
        """Stop the work; a job whose work has just been done is completed all the same."""
        self._cancel_asked = True
        if self.work is not None:
            self.work.cancel()

    def announce(self) -> None:
        """Wake whoever waits for news."""
        self._news.set()
        self._news = asyncio.Event()

    async def wait_end(self) -> None:
        """Until the job has ended."""
        while not self.ended:
            await self._news.wait()

    def view(self, position: int | None, wait_s: float) -> JobView:
        """position: in the queue, None once it runs; wait_s: expected seconds until it runs."""
        eta = self.progress.eta_s()
        return JobView(
            job=self.job.model_copy(update={"step": self.progress.step}),
            progress=self.progress.percent(),
            position=position,
            eta_s=None if eta is None else eta + wait_s,
        )

    def stepped(self, done: int) -> None:
        """Solver steps done; kept in memory, where each is news."""
        self.progress.advance(done)
        self.announce()

    async def begin_attempt(self, expected: Expectation | None, first_step: int, cache: CacheReport | None) -> None:
        """A run begins, at a solver step that an earlier one has saved, or at 0.  cache: what was reused for it."""
        self.progress = Progress(expected, self.job.params.num_inference_steps, first_step)
        self.attempt_began = time.monotonic()
        self._waited += self.attempt_began - self._queued_at
        await self.update(
            attempt=self.job.attempt + 1,
            started_at=self.job.started_at or time.time(),
            timings={"queued": self._waited},
            cache=cache,
        )

    async def update(self, **changes: Unpack[JobChanges]) -> None:
        """Change the row within its state."""
        await self._write(partial(self._store.update, self.id, held=self.job.attempt, **changes))
        self.announce()

    async def enter(self, state: JobState) -> None:
        """A phase begins."""
        step = self.progress.step
        await self._write(partial(self._store.transition, self.id, state, held=self.job.attempt, step=step))
        self.progress.enter(state)
        self.announce()

    async def requeue(self) -> None:
        """Wait for another attempt."""
        self._queued_at = time.monotonic()
        if self.job.state in RUNNING:
            await self.enter(JobState.QUEUED)

    async def end(self, state: JobState, **changes: Unpack[JobChanges]) -> None:
        """The final transition."""
        changes.setdefault("step", self.progress.step)
        changes["timings"] = {**self.job.timings, **changes.get("timings", {})}
        changes["finished_at"] = time.time()
        await self._write(partial(self._store.transition, self.id, state, held=self.job.attempt, **changes))

    async def _write(self, write: Callable[[], Job]) -> None:
        """In a thread, and to its end even where this is cancelled: the row never changes behind `job`."""
        writing = asyncio.ensure_future(asyncio.to_thread(write))
        try:
            self.job = await asyncio.shield(writing)
        except asyncio.CancelledError:
            await asyncio.wait({writing})
            if writing.exception() is None:
                self.job = writing.result()
            raise

    def leave(self) -> None:
        """The driver has nothing more to do with the job; the table knows how it ended."""
        self.ended = True
        self.announce()
