"""The request that shows a model can work: through the text encoder, every rank of a gang and the decoder."""

from __future__ import annotations

import asyncio
import secrets
import time
from dataclasses import dataclass

from app.driver.job_state import Job, JobState, StepCacheReport, VideoParams
from app.driver.progress import Expectation
from app.driver.video_attempt import ModelServices, VideoAttempt
from app.model_card import ModelCard
from deployments.plan import Plan
from deployments.storage import Storage

STEPS = 2
"""Enough for both orders of the solver."""


@dataclass(frozen=True)
class WarmUp:
    """A warm-up that ended well."""

    gang: str
    params: VideoParams
    pace: Expectation


def warm_up_params(card: ModelCard) -> VideoParams:
    """The default request with few steps: it compiles and tunes what users' requests will run."""
    d = card.defaults
    return VideoParams(
        model=card.name,
        prompt="warm-up",
        negative_prompt=d.negative_prompt,
        width=d.width,
        height=d.height,
        num_frames=d.num_frames,
        fps=d.fps,
        num_inference_steps=STEPS,
        guidance_scale=d.guidance_scale,
        guidance_scale_2=d.guidance_scale_2,
        flow_shift=card.flow_shift,
        seed=0,
        max_sequence_length=d.max_sequence_length,
    )


class _Placement:
    """Remembers which gang took the request."""

    gang = ""

    async def entered(self, state: JobState) -> None:
        pass

    async def placed(self, gang: str, plan: Plan, step_cache: StepCacheReport | None) -> None:
        self.gang = gang

    def stepped(self, done: int) -> None:
        pass


async def warm_up(services: ModelServices, storage: Storage) -> WarmUp:
    """Run one; its files are removed, no row is written.  Raises what went wrong."""
    params, placement = warm_up_params(services.card), _Placement()
    job = Job(
        id=f"warm-up-{secrets.token_hex(6)}",
        params=params,
        created_at=time.time(),
        fingerprint=services.card.fingerprint,
    )
    try:
        outcome = await VideoAttempt(services, job, None, checkpoint_every=0).run(placement)
    finally:
        await asyncio.to_thread(storage.delete_prefix, job.id)
    return WarmUp(placement.gang, params, outcome.pace())
