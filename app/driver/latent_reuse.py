"""One model's part of the latent cache in the driver: what a job may start from, and what it leaves to others.

A fault of the cache costs a job nothing but the reuse: it is logged, counted where the call failed, and named in the
job's report.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from app.driver.job_state import Job, JobState, VideoParams
from app.driver.video_attempt import ModelServices, load_saved_state
from app.driver.warm_up import warm_up_params
from app.planning.latent_policy import LatentPolicy
from cache_actors.latent_cache_actor import LatentCacheClient
from cache_actors.latent_calls import Answer, Lookup, Save
from cache_actors.latent_key import LatentIdentity
from cache_actors.latent_report import CacheReport, Reason
from cache_actors.latent_shadow import ShadowResult
from deployments.storage import Storage, StorageUnavailable
from deployments.wan.saved_state import SavedState, donor_key, restarted_numbers

IDENTITIES = 256
"""Remembered: a job's is needed before the queue, at its start and at its end."""
SETTLE_S = 10.0
"""Longest wait of an identical job for the save of the one before it."""

logger = logging.getLogger("ray.serve")


@dataclass(frozen=True)
class Reuse:
    """What the cache gives a job."""

    report: CacheReport
    resume: SavedState | None = None
    """Levels 1 and 2: where to go on."""
    files: Mapping[str, bytes] = field(default_factory=dict)
    """Level 0: the whole result."""
    rival: SavedState | None = None
    """In the shadow: where a hit would have gone on."""


class LatentReuse:
    """Belongs to one event loop.  Nothing here raises but for cancellation, and `store_files`."""

    def __init__(
        self, policy: LatentPolicy, services: ModelServices, storage: Storage, client: LatentCacheClient
    ) -> None:
        self._policy, self._services, self._storage, self._client = policy, services, storage, client
        self._identity = lru_cache(IDENTITIES)(self._make_identity)

    async def warm_up(self) -> None:
        """Load what the first request's keys need: seconds, once."""
        await asyncio.to_thread(self._make_identity, warm_up_params(self._services.card))

    def twin_key(self, params: VideoParams) -> str | None:
        """Equal for jobs of which the second one would get the first one's result; None for one that would not."""
        config = self._policy.config
        word = params.latent_cache
        if word not in ("exact", "approximate") or not params.seed_given:
            return None
        if config.mode != "read_write" or not config.exact_results:
            return None
        return params.model_dump_json(exclude={"latent_cache", "seed_policy", "seed_given"})

    async def stored_result(self, job: Job) -> Reuse | None:
        """Level 0 alone, before the job waits for its turn."""
        try:
            answer = await self._client.stored_result(await self._lookup(job))
            return None if answer is None else self._reuse(answer, job.params)
        except Exception:  # the same question is asked again, and answered, when the job's turn comes
            logger.exception("job %s: the latent cache could not be asked", job.id)
            return None

    async def find(self, job: Job) -> Reuse:
        """The deepest reuse that the job allows."""
        try:
            return self._reuse(await self._client.lookup(await self._lookup(job)), job.params)
        except Exception as error:  # keys that cannot be made, payloads that cannot be read: never the job's fault
            logger.exception("job %s runs without the latent cache", job.id)
            report = CacheReport(decision="error", reason=Reason.INDEX_UNAVAILABLE, detail=repr(error)[:300])
            return Reuse(report)

    async def store_files(self, job: Job, reuse: Reuse) -> dict[str, int]:
        """Level 0: the stored files become the job's.  Raises StorageUnavailable."""

        def write() -> None:
            for name, data in reuse.files.items():
                self._storage.put_bytes(data, f"{job.id}/{name}")

        await asyncio.to_thread(write)
        return {name: len(data) for name, data in reuse.files.items()}

    async def donor_steps(self, job: Job, report: CacheReport) -> tuple[int, ...]:
        """Steps whose entering latents the gang shall store; none for a job that another one's latents started."""
        if job.params.latent_cache == "off" or (report.level == 2 and not report.shadow):
            return ()
        try:
            return self._policy.donor_steps(await asyncio.to_thread(self._identity, job.params))
        except Exception:
            logger.exception("job %s leaves no latents", job.id)
            return ()

    async def kept_steps(self, job: Job, wanted: tuple[int, ...]) -> tuple[int, ...]:
        """Those of the wanted donor steps whose latents are stored."""

        def exist() -> tuple[int, ...]:
            try:
                return tuple(step for step in wanted if self._storage.exists(donor_key(job.id, step)))
            except StorageUnavailable as error:
                logger.warning("job %s: nobody knows which latents it left: %s", job.id, error)
                return ()

        return await asyncio.to_thread(exist)

    async def keep(self, job: Job, as_planned: bool) -> None:
        """Offer what an ended job leaves.

        as_planned: a completed job computed and reused the steps of its plan from the first step on; otherwise its work
        is not what its keys say.
        """
        report, word = job.cache, job.params.latent_cache
        if report is None or word == "off" or report.level == 0 or self._policy.config.mode == "read_only":
            return
        try:
            identity = await asyncio.to_thread(self._identity, job.params)
            if identity.reused_steps and not (as_planned and job.state is JobState.COMPLETED):
                return
            save = await asyncio.to_thread(self._collect, job, identity, report)
            if save.donors:
                save = replace(save, vector=await self._vector(job.params))
            if save.size:
                await self._client.offer(save)
        except FileNotFoundError:
            logger.info("job %s was deleted before the latent cache could take its work", job.id)
        except Exception:  # the job has ended: only its reuse is lost
            logger.exception("job %s leaves nothing to the latent cache", job.id)

    async def settle(self) -> None:
        """Until what was offered is stored, or is taking too long."""
        await self._client.settled(SETTLE_S)

    async def compare(self, job: Job, rival: SavedState) -> None:
        """Shadow: compute the hit that was not served, and record how far it is from the video that was."""
        from app.driver.shadow_run import distance  # here: it brings what a server without shadow runs need not have

        report = job.cache
        try:
            cold = await asyncio.to_thread(load_saved_state, self._storage, job.id)
            if report is None or cold is None or cold.step != job.params.num_inference_steps:
                return  # it did not end well, or its states are not saved
            found = await distance(self._services, self._storage, job, cold, rival)
            identity = await asyncio.to_thread(self._identity, job.params)
            result = ShadowResult(
                request_id=job.id,
                job_id=job.id,
                tenant=job.params.tenant,
                partition=identity.partition(),
                donor=report.donor or "",
                similarity=report.similarity or 0.0,
                skip_steps=rival.step,
                ssim=found.ssim,
                psnr_db=found.psnr_db,
                temporal_error=found.temporal_error,
            )
            await self._client.call("record_shadow", result)
        except Exception:  # a measurement less
            logger.exception("job %s: its shadow run failed", job.id)

    def _collect(self, job: Job, identity: LatentIdentity, report: CacheReport) -> Save:
        completed = job.state is JobState.COMPLETED
        state = load_saved_state(self._storage, job.id)
        donors = {
            step: self._storage.read_bytes(donor_key(job.id, step))
            for step in self._policy.donor_steps(identity)
            if self._storage.exists(donor_key(job.id, step))
        }
        ranks = self._services.card.topology.ranks
        return Save(
            identity=identity,
            request_id=job.id,
            job_id=job.id,
            report=report,
            word=job.params.latent_cache,
            files={name: self._storage.read_bytes(f"{job.id}/{name}") for name in job.files} if completed else None,
            state=None if state is None else (state.step, state.blob),
            donors=donors,
            gpu_seconds=job.timings.get("denoising", 0.0) * ranks + job.timings.get("decoding", 0.0),
        )

    async def _lookup(self, job: Job) -> Lookup:
        params = job.params
        identity = await asyncio.to_thread(self._identity, params)
        vector = await self._vector(params) if params.latent_cache == "approximate" else None
        return Lookup(identity, params.latent_cache, job.id, job.id, params.seed_given, params.seed_policy, vector)

    async def _vector(self, params: VideoParams) -> NDArray[np.float32] | None:
        """The prompt's, where the configured embedder is the text encoder; else the cache makes its own."""
        level_2 = self._policy.config.approximate
        if level_2 is None or level_2.embedder.kind != "text_encoder":
            return None
        return await self._services.text_encoder.pooled.remote(params.prompt, params.max_sequence_length)

    def _reuse(self, answer: Answer, params: VideoParams) -> Reuse:
        report = answer.report
        if report.decision != "hit":
            return Reuse(report)
        match report.level:
            case 0:
                return Reuse(report, files=answer.blobs)
            case 1:
                return Reuse(report, resume=SavedState.from_bytes(answer.blobs["state"]))
        numbers = restarted_numbers(self._services.solver(params).order)
        donated = SavedState(answer.step, numbers, answer.blobs["latents"])
        return Reuse(report, rival=donated) if report.shadow else Reuse(report, resume=donated)

    def _make_identity(self, params: VideoParams) -> LatentIdentity:
        services = self._services
        return self._policy.identity(
            params, services.solver(params), services.latent_shape(params), services.reused_steps(params)
        )
