"""`VideoJobs` without a driver: jobs in a dict, moved from state to state by the test or at a fixed pace."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from app.api.errors import QueueFull, UnknownJob, WrongState
from app.api.video_jobs import JobPage, Order, Readiness
from app.config import Topology, VideoDefaults, VideoLimits
from app.driver.job_state import FINAL, RUNNING, Job, JobState, JobView, VideoParams
from app.model_card import ModelCard

MP4 = bytes(range(256)) * 4
"""1024 bytes that stand for a video: the surface never looks inside."""

STAY = "stay"

ORDER = [JobState.QUEUED, JobState.ENCODING, JobState.DENOISING, JobState.DECODING, JobState.COMPLETED]


def card(name: str = "wan", experts: int = 1, **defaults: Any) -> ModelCard:
    """A model of small defaults: 64x48, 17 frames at 16 fps, at most 96x96 pixels and 41 frames."""
    values: dict[str, Any] = {"width": 64, "height": 48, "num_frames": 17, "num_inference_steps": 4, **defaults}
    return ModelCard(
        name=name,
        created=1_700_000_000,
        fingerprint="f" * 64,
        experts=experts,
        dtype="float32",
        topology=Topology(),
        defaults=VideoDefaults(**values),
        flow_shift=3.0,
        limits=VideoLimits(max_pixels=96 * 96, max_frames=41, max_steps=20, max_prompt_chars=200),
    )


class MemoryFiles:
    """`ResultFiles` in a dict."""

    def __init__(self) -> None:
        self.contents: dict[str, bytes] = {}

    def open_read(self, key: str) -> BinaryIO:
        if key not in self.contents:
            raise FileNotFoundError(key)
        return io.BytesIO(self.contents[key])

    def size(self, key: str) -> int:
        with self.open_read(key) as source:
            return len(source.read())


class AnyVideo:
    """`ResultFiles` that has every key: for a driver in another process."""

    def open_read(self, key: str) -> BinaryIO:
        return io.BytesIO(MP4)

    def size(self, key: str) -> int:
        return len(MP4)


@dataclass
class FakeJobs:
    """pace_s: None leaves every move to `advance`; otherwise a job takes a step whenever somebody looks at it, and
    every `pace_s` seconds while somebody waits.  A job with the prompt STAY moves by `advance` and `cancel` alone."""

    pace_s: float | None = None
    files: MemoryFiles = field(default_factory=MemoryFiles)
    models: dict[str, Readiness] = field(default_factory=lambda: {"wan": Readiness(ready=True, reason="")})
    max_queued: int = 10**9
    jobs: dict[str, Job] = field(default_factory=dict)
    created: int = 0
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def create(self, params: VideoParams) -> JobView:
        if sum(job.state is JobState.QUEUED for job in self.jobs.values()) >= self.max_queued:
            raise QueueFull(f"{self.max_queued} jobs wait already", retry_after_s=2.5)
        self.created += 1
        job = Job(id=f"video_{self.created}", params=params, created_at=1e9 + self.created, fingerprint="f" * 64)
        self.jobs[job.id] = job
        return self._view(job)

    async def get(self, job_id: str) -> JobView:
        job = self._job(job_id)
        if self.pace_s is not None and job.params.prompt != STAY:
            self.advance(job_id)
        return self._view(job)

    async def list(self, limit: int, after: str | None, order: Order) -> JobPage:
        ids = list(self.jobs) if order == "asc" else list(reversed(self.jobs))
        if after is not None:
            ids = ids[ids.index(self._job(after).id) + 1 :]
        return JobPage([self._view(self.jobs[job_id]) for job_id in ids[:limit]], len(ids) > limit)

    async def cancel(self, job_id: str) -> JobView:
        job = self._job(job_id)
        if job.state in FINAL - {JobState.CANCELLED}:
            raise WrongState(f"video {job_id}: is {job.state}")
        self._set(job, JobState.CANCELLED)
        return self._view(job)

    async def delete(self, job_id: str) -> None:
        if self._job(job_id).state not in FINAL:
            raise WrongState(f"video {job_id}: is not final, cancel it first")
        del self.jobs[job_id]

    async def plan(self, job_id: str) -> dict[str, Any]:
        return {"digest": "d" * 64, "nodes": [], "job": self._job(job_id).id}

    async def events(self, job_id: str) -> AsyncIterator[JobView]:
        while True:
            view = self._view(self._job(job_id))
            yield view
            if view.job.state in FINAL:
                return
            await self._change(job_id)

    async def wait(self, job_id: str) -> JobView:
        while self._job(job_id).state not in FINAL:
            await self._change(job_id)
        return self._view(self._job(job_id))

    async def readiness(self) -> dict[str, Readiness]:
        return self.models

    def advance(self, job_id: str) -> None:
        """One state further; a final job stays."""
        job = self._job(job_id)
        if job.state not in FINAL:
            self._set(job, ORDER[ORDER.index(job.state) + 1])

    async def _change(self, job_id: str) -> None:
        if self.pace_s is None or self._job(job_id).params.prompt == STAY:
            await self.changed.wait()
        else:
            await asyncio.sleep(self.pace_s)
            self.advance(job_id)

    def _set(self, job: Job, state: JobState) -> None:
        job.state = state
        if state is JobState.ENCODING:
            job.attempt, job.started_at = 1, job.created_at + 1
        if state in FINAL:
            job.finished_at = job.created_at + 9.5
        if state is JobState.COMPLETED:
            job.step = job.params.num_inference_steps
            names = ["video.mp4", *(f"{name}.{'png' if name == 'sheet' else 'npz'}" for name in job.params.outputs)]
            job.files = dict.fromkeys(names, len(MP4))
            self.files.contents |= {f"{job.id}/{name}": MP4 for name in names}
            job.timings = {"queued": 1.0, "encoding": 0.5}
        self.changed.set()
        self.changed = asyncio.Event()

    def _job(self, job_id: str) -> Job:
        if job_id not in self.jobs:
            raise UnknownJob(f"no video {job_id}", "video_id")
        return self.jobs[job_id]

    def _view(self, job: Job) -> JobView:
        progress = 100 if job.state is JobState.COMPLETED else 50 if job.state in RUNNING else 0
        queued = job.state is JobState.QUEUED
        return JobView(
            job=job.model_copy(deep=True),
            progress=progress,
            position=1 if queued else None,
            eta_s=4.0 if queued else None,
        )
