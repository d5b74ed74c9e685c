"""The driver: takes jobs, keeps them durable, runs them on their model's gangs, and tells how they fare.

A job is written to the table before its id is given out.  Everything here can be lost and rebuilt from the table: on
a start, jobs that were running are queued again, ask the gang that had them, and go on from their last saved solver
state.

    create ──> table ──> JobQueue ──> JobRun (attempts: encode, denoise, decode) ──> table, files
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from app.api.errors import NotReady, UnknownJob, WrongState
from app.api.video_jobs import JobPage, Order, Readiness
from app.config import Jobs
from app.driver.background import Background
from app.driver.job_queue import JobQueue
from app.driver.job_run import JobRun, RunContext
from app.driver.job_state import FINAL, RUNNING, Job, JobError, JobState, JobView, VideoParams
from app.driver.job_store import JobNotFinal, JobNotFound, JobStore
from app.driver.live_job import LiveJob
from app.driver.progress import Pace
from app.driver.readiness import ModelReadiness
from app.driver.video_attempt import ModelServices, VideoAttempt
from cache_actors.latent_report import CacheReport, Reason
from deployments.plan import Plan
from deployments.storage import Storage

if TYPE_CHECKING:
    from app.driver.latent_reuse import LatentReuse

CACHE_ANSWER_S = 5.0
"""Longest wait for the latent cache to read and hand over a payload; on level 2 the time for a vector comes on top."""
DISABLED = CacheReport(decision="disabled", reason=Reason.DISABLED)
"""Of every job on a server without the latent cache."""

logger = logging.getLogger("ray.serve")


@dataclass(frozen=True)
class _Model:
    context: RunContext
    queue: JobQueue


class VideoDriver:
    """Implements `app.api.video_jobs.VideoJobs` for all served models.  Runs on one event loop."""

    def __init__(self, models: Sequence[ModelServices], jobs: Jobs) -> None:
        self._storage = Storage(jobs.storage_url)
        self._store = JobStore(jobs.database_url)
        self._background = Background()
        self._live: dict[str, LiveJob] = {}
        self._models = {services.card.name: self._model(services, jobs) for services in models}
        for job in self._store.unfinished():
            self._recover(job)

    async def check_health(self) -> None:
        """Raises once something has failed that no job is to blame for; Serve then starts another driver."""
        if self._background.failure is not None:
            raise RuntimeError("the driver cannot go on") from self._background.failure

    async def create(self, params: VideoParams) -> JobView:
        """Accept a job: once this returns it survives every restart.  Raises QueueFull."""
        model = self._models[params.model]
        model.queue.promise()
        job = Job(
            id=f"video_{secrets.token_hex(12)}",
            params=params,
            created_at=time.time(),
            fingerprint=model.context.services.card.fingerprint,
            cache=None if model.context.latent_cache else DISABLED,
        )
        # In a task of its own: a caller that goes away in between must not leave a row that nobody runs.
        return await asyncio.shield(asyncio.ensure_future(self._accept(model, job)))

    async def get(self, job_id: str) -> JobView:
        """The job now.  Raises UnknownJob."""
        live = self._live.get(job_id)
        if live is None:
            return _final_view(await self._stored(job_id))
        queue = self._models[live.job.params.model].queue
        return live.view(queue.position(live), queue.wait_s(live))

    async def list(self, limit: int, after: str | None, order: Order) -> JobPage:
        """At most `limit` jobs by creation time, those behind job `after`.  Raises UnknownJob for `after`."""
        try:
            jobs = await asyncio.to_thread(self._store.list, limit + 1, after, order)
        except JobNotFound as error:
            raise UnknownJob(str(error), param="after") from error
        page = [job if job.state in FINAL else await self._newer(job) for job in jobs[:limit]]
        return JobPage([view if isinstance(view, JobView) else _final_view(view) for view in page], len(jobs) > limit)

    async def cancel(self, job_id: str) -> JobView:
        """End a job; a cancelled one stays as it is.  Raises UnknownJob; WrongState once completed or failed."""
        live = self._live.get(job_id)
        if live is not None:
            live.ask_cancel()
            if self._models[live.job.params.model].queue.remove(live):
                self._start(live)  # its run does nothing but end it
            await live.wait_end()
        view = await self.get(job_id)
        if view.job.state is not JobState.CANCELLED:
            raise WrongState(f"job {job_id} is {view.job.state}: only a queued or running job can be cancelled")
        return view

    async def delete(self, job_id: str) -> None:
        """Remove a final job and its files.  Raises UnknownJob; WrongState for a job that is not final."""
        try:
            await asyncio.to_thread(self._store.delete, job_id)
        except JobNotFound as error:
            raise UnknownJob(str(error)) from error
        except JobNotFinal as error:
            raise WrongState(f"{error}; cancel it first") from error
        await asyncio.to_thread(self._storage.delete_prefix, job_id)

    async def plan(self, job_id: str) -> dict[str, Any]:
        """The plan of the job's present attempt, or of its last; before the first, the plan it would get."""
        job = await self._stored(job_id)
        stored = await asyncio.to_thread(self._store.plan, job_id)
        if stored is not None:
            return Plan.from_json(json.loads(stored)).describe()
        model = self._models.get(job.params.model)
        if model is None:
            raise WrongState(f"job {job_id} ended before it had a plan, and its model {job.params.model} is not served")
        attempt = await asyncio.to_thread(VideoAttempt, model.context.services, job, None, 0)
        return attempt.plan.describe()

    async def events(self, job_id: str) -> AsyncIterator[JobView]:
        """The job now, then again on every change; ends after a final state."""
        last = None
        while True:
            live = self._live.get(job_id)
            news = None if live is None else live.news()
            view = await self.get(job_id)
            if view != last:
                yield view
            if view.job.state in FINAL:
                return
            last = view
            if news is None:
                raise _elsewhere(view.job)
            await news.wait()

    async def wait(self, job_id: str) -> JobView:
        """The job once it is final.  Raises UnknownJob."""
        live = self._live.get(job_id)
        if live is not None:
            await live.wait_end()
        view = await self.get(job_id)
        if view.job.state not in FINAL:
            raise _elsewhere(view.job)
        return view

    async def readiness(self) -> dict[str, Readiness]:
        """Readiness by model name."""
        return {name: model.context.readiness.state() for name, model in self._models.items()}

    def _model(self, services: ModelServices, jobs: Jobs) -> _Model:
        pace, topology, cache = Pace(), services.card.topology, self._latent_cache(services)
        context = RunContext(
            services=services,
            storage=self._storage,
            pace=pace,
            readiness=ModelReadiness(services, self._storage, pace, self._background),
            max_attempts=jobs.max_attempts,
            checkpoint_every=jobs.checkpoint_every_steps,
            latent_cache=cache,
        )
        capacity = topology.gangs * topology.requests_in_flight
        queue = JobQueue(services.card.name, capacity, jobs.max_queued, self._start)
        if cache is not None:
            queue = JobQueue(services.card.name, capacity, jobs.max_queued, self._start, cache.twin_key)
            self._background.spawn(cache.warm_up())
        return _Model(context, queue)

    def _latent_cache(self, services: ModelServices) -> LatentReuse | None:
        if services.latent_cache is None:
            return None
        # Here: a driver without the latent cache loads nothing of it.
        from app.driver.latent_reuse import LatentReuse
        from cache_actors.latent_cache_actor import LatentCacheClient

        level_2 = services.latent_cache.config.approximate
        client = LatentCacheClient(CACHE_ANSWER_S + (level_2.lookup_timeout_s if level_2 else 0.0))
        return LatentReuse(services.latent_cache, services, self._storage, client)

    def _recover(self, job: Job) -> None:
        model = self._models.get(job.params.model)
        error = None
        if model is None:
            error = JobError(code="model_not_served", message=f"model {job.params.model} is no longer served")
        elif model.context.services.card.fingerprint != job.fingerprint:
            error = JobError(
                code="model_changed",
                message=f"the weights of model {job.params.model} have changed since the job was accepted; "
                "create it again to have it made with the new ones",
            )
        if model is None or error is not None:
            self._store.transition(job.id, JobState.FAILED, error=error, finished_at=time.time())
            self._storage.delete_prefix(job.id)
            return
        if job.state in RUNNING:
            logger.warning("job %s was %s when the driver was lost: it is queued again", job.id, job.state)
            job = self._store.transition(job.id, JobState.QUEUED)
        model.queue.add(self._take(model, job))

    async def _accept(self, model: _Model, job: Job) -> JobView:
        try:
            await asyncio.to_thread(self._store.create, job)
            live = self._take(model, job)
            if await JobRun(model.context, live).finish_from_store():
                self._leave(live)
            else:
                model.queue.add(live)
        finally:
            model.queue.withdraw()
        return await self.get(job.id)

    def _take(self, model: _Model, job: Job) -> LiveJob:
        live = self._live[job.id] = LiveJob(self._store, job, model.context.pace.expect(job.params))
        return live

    def _start(self, live: LiveJob) -> None:
        self._background.spawn(self._run(live))

    async def _run(self, live: LiveJob) -> None:
        model = self._models[live.job.params.model]
        run = JobRun(model.context, live)
        try:
            await run.run()
        finally:
            self._leave(live)
            model.queue.done(live)
        self._background.spawn(self._afterwards(model, run, live))

    async def _afterwards(self, model: _Model, run: JobRun, live: LiveJob) -> None:
        """What the job's owner need not wait for."""
        await run.keep()
        model.queue.release(live)  # a twin, waiting or about to come, finds the result now
        await run.tidy(idle=model.queue.idle)

    def _leave(self, live: LiveJob) -> None:
        del self._live[live.id]
        live.leave()

    async def _newer(self, job: Job) -> JobView | Job:
        """A job that was not final when its row was read."""
        try:
            return await self.get(job.id)
        except UnknownJob:  # it has ended and was deleted since
            return job

    async def _stored(self, job_id: str) -> Job:
        try:
            return await asyncio.to_thread(self._store.get, job_id)
        except JobNotFound as error:
            raise UnknownJob(str(error)) from error


def _elsewhere(job: Job) -> NotReady:
    return NotReady(f"job {job.id} is {job.state}, but not with this driver: another one is taking over", None, 2.0)


def _final_view(job: Job) -> JobView:
    return JobView(job=job, progress=100 if job.state is JobState.COMPLETED else 0)
