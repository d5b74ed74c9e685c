"""A level-2 hit that was not served is computed after all, and held against the cold video that was.

Both are compared as frames before video encoding, as in the calibration.
"""

from __future__ import annotations

import asyncio
import io
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from app.driver.job_state import Job, JobState, StepCacheReport
from app.driver.video_attempt import ModelServices, VideoAttempt
from app.quality import psnr, ssim, temporal_error
from deployments.plan import Plan
from deployments.storage import Storage
from deployments.wan.saved_state import SavedState


@dataclass(frozen=True)
class Distance:
    """Of the hit from the cold video."""

    ssim: float
    psnr_db: float | None
    """None for equal videos."""
    temporal_error: float


class _Unheard:
    async def entered(self, state: JobState) -> None:
        pass

    async def placed(self, gang: str, plan: Plan, step_cache: StepCacheReport | None) -> None:
        pass

    def stepped(self, done: int) -> None:
        pass


async def distance(
    services: ModelServices, storage: Storage, job: Job, cold: SavedState, rival: SavedState
) -> Distance:
    """cold: the job's latents after its last step.  rival: the donor's, where the hit would have gone on.

    Runs on the gang and the decoder like a job; its files are removed.  Raises what went wrong.
    """
    ids = f"{job.id}-cold", f"{job.id}-hit"
    try:
        videos = [
            await _frames(services, storage, job, name, start) for name, start in zip(ids, (cold, rival), strict=True)
        ]
    finally:
        for name in ids:
            await asyncio.to_thread(storage.delete_prefix, name)
    return await asyncio.to_thread(_compare, *videos)


async def _frames(
    services: ModelServices, storage: Storage, job: Job, name: str, start: SavedState
) -> NDArray[np.uint8]:
    params = job.params.model_copy(update={"outputs": ("frames",)})
    run = job.model_copy(update={"id": name, "params": params, "gang": None})
    attempt = await asyncio.to_thread(VideoAttempt, services, run, start, 0)
    await attempt.run(_Unheard())
    data = await asyncio.to_thread(storage.read_bytes, f"{name}/frames.npz")
    frames: NDArray[np.uint8] = np.load(io.BytesIO(data))["frames"]
    return frames


def _compare(cold: NDArray[np.uint8], hit: NDArray[np.uint8]) -> Distance:
    x, y = cold / 255.0, hit / 255.0
    decibels = psnr(x, y)
    return Distance(ssim(x, y), decibels if np.isfinite(decibels) else None, temporal_error(x, y))
