"""The driver: takes jobs, keeps them durable, runs them on their model's gangs, and tells how they fare.

A job is written to the table before its id is given out.  Everything here can be lost and rebuilt from the table: on a
start, jobs that were running are queued again, ask the gang that had them, and go on from their last saved solver state.

    create ──> table ──> queue of the model ──> attempt (encode, denoise, decode) ──> table, files
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from app.api.errors import QueueFull, UnknownJob, WrongState
from app.api.video_jobs import JobPage, Order, Readiness
from app.config import Jobs
from app.driver.job_state import FINAL, RUNNING, Job, JobError, JobState, JobView, VideoParams
from app.driver.job_store import JobNotFinal, JobNotFound, JobStore
from app.driver.progress import Pace, Progress
from app.driver.video_attempt import ModelServices, Outcome, VideoAttempt, load_solver_state, worker_was_lost
from app.driver.warm_up import WarmUp, warm_up
from deployments.plan import Plan
from deployments.storage import Storage

RETRY_PAUSE_S = 0.5
"""Between attempts; Serve notices a death and routes around it within this order of time."""

logger = logging.getLogger("ray.serve")


@dataclass
class _Live:
    """A job that is not final."""

    job: Job
    progress: Progress
    task: asyncio.Task[None] | None = None
    cancelled: bool = False
    waited: float = 0.0
    """Seconds queued in earlier attempts."""
    queued_at: float = field(default_factory=time.monotonic)


class _Model:
    """One served model as the driver sees it: its queue and its readiness."""

    def __init__(self, services: ModelServices) -> None:
        self.services = services
        self.pace = Pace()
        self.queue: deque[str] = deque()
        self.running: set[str] = set()
        self.not_ready = "warming up: no request has run through every rank yet"

    @property
    def capacity(self) -> int:
        topology = self.services.card.topology
        return topology.gangs * topology.requests_in_flight


class VideoDriver:
    """Implements `app.api.video_jobs.VideoJobs` for all served models.  Runs on one event loop."""

    def __init__(self, models: Sequence[ModelServices], jobs: Jobs) -> None:
        self._config = jobs
        self._storage = Storage(jobs.storage_url)
        self._store = JobStore(jobs.database_url)
        self._models = {services.card.name: _Model(services) for services in models}
        self._live: dict[str, _Live] = {}
        self._changed = asyncio.Condition()
        self._tasks: set[asyncio.Task[None]] = set()
        self._wake = asyncio.Event()
        self._recover()
        # Started here, outside of any request: a task inherits the context of its creator, and a Serve handle used in
        # the context of one request takes concurrent calls for one and the same.
        self._spawn(self._dispatch())
        for model in self._models.values():
            self._spawn(self._warm_up(model))

    # --- what the HTTP surface asks ------------------------------------------------------------------------------

    async def create(self, params: VideoParams) -> JobView:
        """Accept a job: once this returns it survives every restart.  Raises QueueFull."""
        model = self._models[params.model]
        if len(model.queue) >= self._config.max_queued:
            raise QueueFull(
                f"model {params.model}: {len(model.queue)} jobs are waiting, as many as jobs.max_queued allows",
                retry_after_s=self._wait_for_a_place(model),
            )
        job = Job(
            id=f"video_{secrets.token_hex(12)}",
            params=params,
            created_at=time.time(),
            fingerprint=model.services.card.fingerprint,
        )
        live = self._live[job.id] = _Live(job, Progress(model.pace.expect(params), params.num_inference_steps))
        model.queue.append(job.id)
        try:
            await asyncio.to_thread(self._store.create, job)
        except BaseException:
            self._forget(live)
            raise
        self._wake.set()
        return self._view(live)

    async def get(self, job_id: str) -> JobView:
        """The job now.  Raises UnknownJob."""
        live = self._live.get(job_id)
        return self._view(live) if live else self._stored_view(await self._stored(job_id))

    async def list(self, limit: int, after: str | None, order: Order) -> JobPage:
        """At most `limit` jobs by creation time, those behind job `after`.  Raises UnknownJob for `after`."""
        try:
            jobs = await asyncio.to_thread(self._store.list, limit + 1, after, order)
        except JobNotFound as error:
            raise UnknownJob(str(error), param="after") from error
        views = [self._view(self._live[job.id]) if job.id in self._live else self._stored_view(job) for job in jobs]
        return JobPage(views[:limit], len(views) > limit)

    async def cancel(self, job_id: str) -> JobView:
        """End a job; a cancelled one stays as it is.  Raises UnknownJob; WrongState once completed or failed."""
        live = self._live.get(job_id)
        if live is None:
            job = await self._stored(job_id)
            if job.state is not JobState.CANCELLED:
                raise WrongState(f"job {job_id} is {job.state}: only a queued or running job can be cancelled")
            return self._stored_view(job)
        live.cancelled = True
        if live.task is None:
            await self._end(live, JobState.CANCELLED)
        else:
            live.task.cancel()
            await asyncio.wait({live.task})
        return await self.get(job_id)

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
        await self.get(job_id)
        stored = await asyncio.to_thread(self._store.plan, job_id)
        if stored is not None:
            return Plan.from_json(json.loads(stored)).describe()
        job = (await self.get(job_id)).job
        return VideoAttempt(self._models[job.params.model].services, job, None, 0).plan.describe()

    async def events(self, job_id: str) -> AsyncIterator[JobView]:
        """The job now, then again on every change; ends after a final state."""
        last = None
        while True:
            view = await self.get(job_id)
            if view != last:
                yield view
            if view.job.state in FINAL:
                return
            last = view
            async with self._changed:
                if self._live.get(job_id) is not None:
                    await self._changed.wait()

    async def wait(self, job_id: str) -> JobView:
        """The job once it is final.  Raises UnknownJob."""
        while (view := await self.get(job_id)).job.state not in FINAL:
            async with self._changed:
                if self._live.get(job_id) is not None:
                    await self._changed.wait()
        return view

    async def readiness(self) -> dict[str, Readiness]:
        """Readiness by model name."""
        return {name: Readiness(ready=not m.not_ready, reason=m.not_ready) for name, m in self._models.items()}

    # --- queue ---------------------------------------------------------------------------------------------------

    def _recover(self) -> None:
        for job in self._store.unfinished():
            model = self._models.get(job.params.model)
            if model is None:
                error = JobError(code="model_not_served", message=f"model {job.params.model} is no longer served")
                self._store.transition(job.id, JobState.FAILED, error=error, finished_at=time.time())
                continue
            if job.state in RUNNING:
                logger.warning("job %s was %s when the driver was lost: it is queued again", job.id, job.state)
                job = self._store.transition(job.id, JobState.QUEUED)
            self._live[job.id] = _Live(job, Progress(model.pace.expect(job.params), job.params.num_inference_steps))
            model.queue.append(job.id)
        self._wake.set()

    async def _dispatch(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            for model in self._models.values():
                while model.queue and len(model.running) < model.capacity:
                    job_id = model.queue.popleft()
                    model.running.add(job_id)
                    live = self._live[job_id]
                    live.task = self._spawn(self._run(model, live))

    def _wait_for_a_place(self, model: _Model) -> float:
        running = [self._live[job_id].progress.eta_s() for job_id in model.running]
        return min((eta for eta in running if eta is not None), default=5.0)

    async def _run(self, model: _Model, live: _Live) -> None:
        """All attempts of one job, to a final state."""
        try:
            while not await self._attempt_once(model, live):
                await asyncio.sleep(RETRY_PAUSE_S)
        except asyncio.CancelledError:
            if not live.cancelled:
                raise  # the driver itself is going: the table says where the job was
            await self._end(live, JobState.CANCELLED)
        except Exception as error:
            logger.exception("job %s failed", live.job.id)
            message = f"{type(error).__name__}: {str(error).strip().splitlines()[-1] if str(error).strip() else ''}"
            await self._end(live, JobState.FAILED, error=JobError(code="generation_failed", message=message))
        finally:
            model.running.discard(live.job.id)
            self._wake.set()

    async def _attempt_once(self, model: _Model, live: _Live) -> bool:
        """True once the job is final; False to try again after a lost worker."""
        job = live.job
        resume = await asyncio.to_thread(load_solver_state, self._storage, job)
        live.progress = Progress(model.pace.expect(job.params), job.params.num_inference_steps)
        if resume is not None:
            live.progress.step = live.progress.first_step = resume.step
        waited = live.waited = live.waited + time.monotonic() - live.queued_at
        began = time.time()
        live.job = job = await self._change(
            live, attempt=job.attempt + 1, started_at=job.started_at or began, timings={"queued": waited}
        )
        try:
            attempt = VideoAttempt(model.services, job, resume, self._config.checkpoint_every_steps)
            outcome = await attempt.run(_RowReporter(self, live))
        except Exception as error:
            if not worker_was_lost(error):
                raise
            logger.warning("job %s, attempt %d: a worker was lost: %r", job.id, job.attempt, error)
            if model.capacity == model.services.card.topology.requests_in_flight and not model.not_ready:
                model.not_ready = "the gang is restarting after the loss of a worker"
                self._spawn(self._warm_up(model))
            if job.attempt >= self._config.max_attempts:
                message = f"a worker was lost in each of {job.attempt} attempts (jobs.max_attempts); the last: {error}"
                await self._end(live, JobState.FAILED, error=JobError(code="worker_lost", message=message))
                return True
            live.queued_at = time.monotonic()
            if live.job.state is not JobState.QUEUED:
                await self._enter(live, JobState.QUEUED)
            return False
        await self._complete(model, live, outcome, waited, began)
        return True

    async def _complete(self, model: _Model, live: _Live, outcome: Outcome, waited: float, began: float) -> None:
        timings = {"queued": waited, **outcome.timings, "attempt": time.time() - began}
        steps = live.job.params.num_inference_steps
        await self._end(live, JobState.COMPLETED, files=outcome.files, timings=timings, step=steps)
        if outcome.computed_steps:
            model.pace.observe(live.job.params, outcome.pace())

    # --- one job's row -------------------------------------------------------------------------------------------

    async def _change(self, live: _Live, **changes: Any) -> Job:
        live.job = await asyncio.to_thread(self._store.update, live.job.id, **changes)
        await self._announce()
        return live.job

    async def _enter(self, live: _Live, state: JobState) -> None:
        live.job = await asyncio.to_thread(self._store.transition, live.job.id, state, step=live.progress.step)
        live.progress.enter(state)
        await self._announce()

    async def _end(self, live: _Live, state: JobState, **changes: Any) -> None:
        job_id = live.job.id
        changes.setdefault("step", live.progress.step)
        live.job = await asyncio.to_thread(self._store.transition, job_id, state, finished_at=time.time(), **changes)
        self._forget(live)
        keep = set(live.job.files)
        await asyncio.to_thread(self._clean, job_id, keep)
        await self._announce()

    def _clean(self, job_id: str, keep: set[str]) -> None:
        """Solver states and files of a job that is no longer going to be completed."""
        for key in self._storage.list(job_id):
            if key.removeprefix(f"{job_id}/") not in keep:
                self._storage.delete(key)

    def _forget(self, live: _Live) -> None:
        self._live.pop(live.job.id, None)
        queue = self._models[live.job.params.model].queue
        if live.job.id in queue:
            queue.remove(live.job.id)

    async def _announce(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _stored(self, job_id: str) -> Job:
        try:
            return await asyncio.to_thread(self._store.get, job_id)
        except JobNotFound as error:
            raise UnknownJob(str(error)) from error

    def _stored_view(self, job: Job) -> JobView:
        return JobView(job=job, progress=100 if job.state is JobState.COMPLETED else 0)

    def _view(self, live: _Live) -> JobView:
        model = self._models[live.job.params.model]
        job = live.job.model_copy(update={"step": live.progress.step})
        eta = live.progress.eta_s()
        position = model.queue.index(job.id) + 1 if job.id in model.queue else None
        if position is not None and eta is not None:
            ahead = [*model.running, *list(model.queue)[: position - 1]]
            eta += sum(self._live[other].progress.eta_s() or 0.0 for other in ahead) / model.capacity
        return JobView(job=job, progress=live.progress.percent(), position=position, eta_s=eta)

    async def _warm_up(self, model: _Model) -> None:
        """Run small requests until every gang has finished one; the model is ready from then on."""
        gangs: set[str] = set()
        wanted = model.services.card.topology.gangs
        while len(gangs) < wanted:
            tries = (warm_up(model.services, self._storage) for _ in range(wanted - len(gangs)))
            for result in await asyncio.gather(*tries, return_exceptions=True):
                if isinstance(result, WarmUp):
                    gangs.add(result.gang)
                    model.pace.observe(result.params, result.pace)
                else:
                    logger.warning("warm-up of model %s: %r", model.services.card.name, result)
                    model.not_ready = f"warming up; the last try ended with {type(result).__name__}"
                    await asyncio.sleep(RETRY_PAUSE_S)
        model.not_ready = ""
        logger.info("model %s is ready", model.services.card.name)

    def _spawn(self, work: Any) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


class _RowReporter:
    """Writes what an attempt reports to its job's row."""

    def __init__(self, driver: VideoDriver, live: _Live) -> None:
        self._driver, self._live = driver, live

    async def entered(self, state: JobState) -> None:
        await self._driver._enter(self._live, state)

    async def placed(self, gang: str, plan: Plan) -> None:
        await self._driver._change(self._live, gang=gang, plan=json.dumps(plan.to_json()))

    def stepped(self, done: int) -> None:
        self._live.progress.step = done
        self._driver._spawn(self._driver._announce())
