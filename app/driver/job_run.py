"""One job on its way to a final state: attempt after attempt, until one succeeds or none makes sense."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from app.driver.failure import job_error, lost_too_often, worker_was_lost
from app.driver.job_state import IllegalTransition, JobState, StepCacheReport
from app.driver.job_store import JobIsFinal, JobNotFound, JobTakenOver
from app.driver.live_job import LiveJob
from app.driver.progress import Pace
from app.driver.readiness import ModelReadiness
from app.driver.video_attempt import ModelServices, Outcome, VideoAttempt, load_saved_state
from deployments.plan import Plan
from deployments.storage import Storage, StorageUnavailable
from deployments.wan.saved_state import SavedState

if TYPE_CHECKING:
    from app.driver.latent_reuse import LatentReuse, Reuse  # a driver without the latent cache need not load it

_TAKEN_OVER = (JobTakenOver, IllegalTransition, JobIsFinal, JobNotFound)
"""The row is not as this driver left it."""
LATE_WRITES_S = 10.0
"""After the end of a job a rank may still be writing a solver state, or a decoder a file, that it had begun before."""

logger = logging.getLogger("ray.serve")


@dataclass(frozen=True)
class RunContext:
    """What runs of one model share."""

    services: ModelServices
    storage: Storage
    pace: Pace
    readiness: ModelReadiness
    max_attempts: int
    checkpoint_every: int
    latent_cache: LatentReuse | None
    """None on a server without it."""


class JobRun:
    """Runs one job.  Everything that can take long or be cancelled is in `LiveJob.work`; this object writes the ends.

    So a cancel that races with the end of the work finds either a work to cancel or a job that is being completed,
    and a driver that is told to go leaves the row as it is: the table says where the job was.
    """

    def __init__(self, context: RunContext, live: LiveJob) -> None:
        self._context, self._live = context, live
        self._losses, self._furthest = 0, live.job.step
        self._report = live.job.cache
        self._rival: SavedState | None = None
        self._donor_steps: tuple[int, ...] = ()
        self._as_planned = True
        self._taken_over = False

    async def run(self) -> None:
        """Until the job is final."""
        live = self._live
        try:
            while not await self._once():
                pass
        except _TAKEN_OVER as error:
            logger.warning("job %s is another driver's now: %s", live.id, error)
            self._taken_over = True
            return
        if self._context.latent_cache is None:
            await self._clean()

    async def finish_from_store(self) -> bool:
        """Before the queue: whether the latent cache had the very result; the job is completed with it then."""
        cache, live = self._context.latent_cache, self._live
        found = None if cache is None else await cache.stored_result(live.job)
        if cache is None or found is None:
            return False
        try:
            await self._complete(await self._stored(cache, found))
        except StorageUnavailable as error:
            logger.warning("job %s: its stored result could not be copied, it is computed: %s", live.id, error)
            return False
        return True

    async def keep(self) -> None:
        """After the end: leave the job's work to the latent cache, until it is stored."""
        cache = self._context.latent_cache
        if cache is not None and not self._taken_over:
            await cache.keep(self._live.job, self._as_planned)
            await cache.settle()

    async def tidy(self, idle: bool) -> None:
        """Last of all: compare a hit that was not served, where nobody waits (idle), and remove what workers left."""
        if self._taken_over:
            return  # what lies there is another driver's
        cache = self._context.latent_cache
        if cache is not None:
            if self._rival is not None and idle:
                await cache.compare(self._live.job, self._rival)
            await self._clean()
        await asyncio.sleep(LATE_WRITES_S)
        await self._clean()

    async def _once(self) -> bool:
        """One attempt and its consequence.  True once the job is final."""
        live = self._live
        if live.cancel_asked():
            await live.end(JobState.CANCELLED)
            return True
        work = live.work = asyncio.get_running_loop().create_task(self._attempt())
        try:
            await asyncio.wait({work})
        finally:
            work.cancel()  # where this task is cancelled itself
        if work.cancelled():
            if not live.cancel_asked():
                raise asyncio.CancelledError  # the loop is being closed, and cancels every task
            await live.end(JobState.CANCELLED)
            return True
        error = work.exception()
        if error is None:
            await self._complete(work.result())
        elif live.cancel_asked():
            await live.end(JobState.CANCELLED)
        elif isinstance(error, _TAKEN_OVER):
            raise error
        elif worker_was_lost(error):
            return await self._lost(error)
        else:
            logger.error("job %s failed", live.id, exc_info=error)
            await live.end(JobState.FAILED, error=job_error(error, live.job.params))
        return True

    async def _attempt(self) -> Outcome:
        context, live = self._context, self._live
        if self._losses:
            await context.readiness.proven()  # warm-ups fail on a gang that is going down, so that jobs need not
        saved = await asyncio.to_thread(load_saved_state, context.storage, live.id)
        cache = context.latent_cache
        if cache is not None and saved is None:  # with a state of its own the job goes on, as what it began as
            found = await cache.find(live.job)
            if found.files:
                return await self._stored(cache, found)
            saved, self._report, self._rival = found.resume, found.report, found.rival
        elif saved is not None:
            self._as_planned = False  # residuals from before a loss are lost with it
        if cache is not None and self._report is not None:
            self._donor_steps = await cache.donor_steps(live.job, self._report)
        first = saved.step if saved else 0
        await live.begin_attempt(context.pace.expect(live.job.params), first, cache=self._report)
        # In a thread: the timesteps of a model with two experts are computed by its scheduler.
        attempt = await asyncio.to_thread(
            VideoAttempt, context.services, live.job, saved, context.checkpoint_every, self._donor_steps
        )
        outcome = await attempt.run(_RowReporter(live))
        self._as_planned &= outcome.as_planned
        return outcome

    async def _stored(self, cache: LatentReuse, found: Reuse) -> Outcome:
        """The latent cache had the very result."""
        self._report = found.report
        return Outcome(await cache.store_files(self._live.job, found), {}, 0, self._live.job.step_cache)

    async def _complete(self, outcome: Outcome) -> None:
        live, cache, report = self._live, self._context.latent_cache, self._report
        timings = {**outcome.timings, "attempt": time.monotonic() - live.attempt_began}
        steps = live.job.params.num_inference_steps
        if cache is not None and report is not None and self._donor_steps:
            report = report.model_copy(update={"saved_steps": await cache.kept_steps(live.job, self._donor_steps)})
        await live.end(
            JobState.COMPLETED,
            files=outcome.files,
            timings=timings,
            step=steps,
            step_cache=outcome.step_cache,
            cache=report,
        )
        if outcome.computed_steps:
            self._context.pace.observe(live.job.params, outcome.pace())

    async def _lost(self, error: BaseException) -> bool:
        """A loss counts as long as the job gets no further: one that makes progress may lose any number of workers."""
        live, context = self._live, self._context
        logger.warning("job %s, attempt %d: a worker was lost: %r", live.id, live.job.attempt, error)
        context.readiness.worker_lost()
        further = live.progress.step > self._furthest
        self._furthest = max(self._furthest, live.progress.step)
        self._losses = 1 if further else self._losses + 1
        if self._losses >= context.max_attempts:
            await live.end(JobState.FAILED, error=lost_too_often(error, self._losses))
            return True
        await live.requeue()
        return False

    async def _clean(self) -> None:
        await asyncio.to_thread(self._remove_leftovers)

    def _remove_leftovers(self) -> None:
        """Everything stored for the job but its result files."""
        live, storage = self._live, self._context.storage
        try:
            for key in storage.list(live.id):
                if key.removeprefix(f"{live.id}/") not in live.job.files:
                    storage.delete(key)
        except StorageUnavailable as error:
            logger.warning("job %s has ended; its leftovers stay: %s", live.id, error)


class _RowReporter:
    """Writes what an attempt reports to its job's row."""

    def __init__(self, live: LiveJob) -> None:
        self._live = live

    async def entered(self, state: JobState) -> None:
        await self._live.enter(state)

    async def placed(self, gang: str, plan: Plan, step_cache: StepCacheReport | None) -> None:
        await self._live.update(gang=gang, plan=json.dumps(plan.to_json()), step_cache=step_cache)

    def stepped(self, done: int) -> None:
        self._live.stepped(done)
