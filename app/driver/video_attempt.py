"""One run of one job: prompt to embeddings, embeddings to latents, latents to files.

Big tensors go from replica to replica by reference; the driver holds only the references.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import ray
from ray.serve.handle import DeploymentHandle

from app.driver.job_state import Job, JobState, Native, RankSteps, StepCacheReport, VideoParams
from app.driver.progress import Expectation
from app.model_card import ModelCard
from app.planning.video_plan import video_plan
from deployments.gang.gang_lost import GangLost
from deployments.plan import Plan
from deployments.storage import Storage
from deployments.wan.saved_state import SavedState, solver_state_key
from deployments.wan.solver_spec import SolverSpec
from deployments.wan.video_task import VideoTask

if TYPE_CHECKING:
    # They bring torch, which a driver without them need not load.
    from app.planning.latent_policy import LatentPolicy
    from app.planning.step_cache_policy import StepCachePolicy

logger = logging.getLogger("ray.serve")


@dataclass(frozen=True)
class ModelServices:
    """One served model: its facts and the deployments that do its work."""

    card: ModelCard
    scheduler: str
    scheduler_config: dict[str, Any]
    boundary_ratio: float | None
    latent_channels: int
    vae_stride: tuple[int, int]
    """Frames a latent frame (the first holds one), pixels a latent pixel."""
    text_encoder: DeploymentHandle
    gang: DeploymentHandle
    decoder: DeploymentHandle
    step_cache: StepCachePolicy | None = None
    """None on a model without a profile."""
    latent_cache: LatentPolicy | None = None
    """None on a server without the latent cache."""

    def solver(self, params: VideoParams) -> SolverSpec:
        """Of a request."""
        steps, shift = params.num_inference_steps, params.flow_shift
        return SolverSpec(self.scheduler, self.scheduler_config, steps, shift, self.boundary_ratio)

    def latent_shape(self, params: VideoParams) -> tuple[int, int, int, int, int]:
        """(1, C, F, H, W) of a request."""
        frames, pixels = self.vae_stride
        latent_frames = (params.num_frames - 1) // frames + 1
        return (1, self.latent_channels, latent_frames, params.height // pixels, params.width // pixels)

    def reused_steps(self, params: VideoParams) -> tuple[int, ...]:
        """What the step cache reuses in a run from the first step on."""
        return self.step_cache.decide(params, self.solver(params), 0).reuse if self.step_cache else ()


@dataclass(frozen=True)
class Outcome:
    """A finished attempt."""

    files: dict[str, int]
    timings: dict[str, float]
    """Seconds: encoding, denoising, decoding, file."""
    computed_steps: int
    step_cache: StepCacheReport | None
    """None on a model without a profile."""
    as_planned: bool = True
    """False: a rank computed steps that the plan reuses."""

    def pace(self) -> Expectation:
        """What this attempt says about the model's speed; not for one that computed no step."""
        return Expectation(
            encode=self.timings["encoding"],
            step=self.timings["denoising"] / self.computed_steps,
            decode=self.timings["decoding"] + self.timings["file"],
        )


class Reporter(Protocol):
    """Whoever follows an attempt."""

    async def entered(self, state: JobState) -> None:
        """A phase begins."""

    async def placed(self, gang: str, plan: Plan, step_cache: StepCacheReport | None) -> None:
        """A gang has taken the job and walks this plan; what its step cache is to do."""

    def stepped(self, done: int) -> None:
        """The solver's steps done, those before a resume included."""


class VideoAttempt:
    """Runs a job once; cancelling `run` cancels the work wherever it is."""

    def __init__(
        self,
        services: ModelServices,
        job: Job,
        resume: SavedState | None,
        checkpoint_every: int,
        donor_steps: tuple[int, ...] = (),
    ) -> None:
        """resume: where an earlier attempt got to, or another job.  checkpoint_every: steps between saved solver
        states; 0: none.  donor_steps: those whose entering latents are stored."""
        self._services, self._job, self._resume = services, job, resume
        self._checkpoint_every, self._donor_steps = checkpoint_every, donor_steps
        self._solver = services.solver(job.params)
        start = resume.step if resume else 0
        policy = services.step_cache
        self._reuse = policy.decide(job.params, self._solver, start) if policy else None
        self.plan = video_plan(
            stages=services.card.topology.pp,
            chains=services.card.topology.cfg,
            guidance_scale=job.params.guidance_scale,
            experts=self._solver.experts(),
            start=start,
            reuse=self._reuse.reuse if self._reuse else (),
        )
        self._ranks: list[dict[str, Any]] = []
        """What the gang's ranks reported, once denoising has ended."""

    async def run(self, reporter: Reporter) -> Outcome:
        """Raises what went wrong; `failure.worker_was_lost` tells whether another attempt makes sense."""
        job, timings = self._job, {}
        await reporter.entered(JobState.ENCODING)
        if self.plan.steps:
            text, timings["encoding"] = await self._encode()
            latents, timings["denoising"] = await self._denoise(text, reporter)
        else:
            assert self._resume is not None  # a worker was lost after the last step: only the files are missing
            latents = [self._resume.blob]
            await reporter.entered(JobState.DENOISING)
        await reporter.entered(JobState.DECODING)
        response = self._services.decoder.decode.remote(job.id, latents, job.params.fps, job.params.outputs)
        try:
            decoded = await response
        finally:
            response.cancel()
        timings |= {"decoding": decoded["decode_s"], "file": decoded["encode_s"]}
        as_planned = not any(rank.get("native") for rank in self._ranks)
        return Outcome(decoded["files"], timings, len(self.plan.steps), self.step_cache_report(), as_planned)

    def step_cache_report(self) -> StepCacheReport | None:
        """What the step cache is to do, and once denoising has ended what it did; None without a profile."""
        policy, decision = self._services.step_cache, self._reuse
        if policy is None or decision is None:
            return None
        vetoed = next((Native(**rank["native"]) for rank in self._ranks if rank.get("native")), None)
        planned = Native(code=decision.native.code, message=decision.native.message) if decision.native else None
        return StepCacheReport(
            profile=policy.profile.profile_id,
            status=policy.status.value,
            reuse=decision.reuse,
            native=planned or vetoed,
            ranks=tuple(RankSteps(**{k: rank[k] for k in ("rank", "stage", "branches")}) for rank in self._ranks),
        )

    async def _encode(self) -> tuple[list[ray.ObjectRef], float]:
        params = self._job.params
        negative = params.negative_prompt if "negative" in self.plan.branches else None
        response = self._services.text_encoder.encode.remote(params.prompt, negative, params.max_sequence_length)
        try:
            encoded = await response
        finally:
            response.cancel()
        return encoded["blob"], encoded["seconds"]

    async def _denoise(self, text: list[ray.ObjectRef], reporter: Reporter) -> tuple[list[ray.ObjectRef], float]:
        plan, resume = self.plan, self._resume
        spec: dict[str, Any] = {"task": self._task().to_json(), "resume": None}
        blobs: list[ray.ObjectRef | bytes] = list(text)
        if resume is not None:
            spec["resume"] = {"step": resume.step, "numbers": dict(resume.numbers)}
            blobs.append(resume.blob)
        handle = self._services.gang.options(stream=True, session_id=self._job.gang or "")
        stream = handle.generate.remote(self._job.id, spec, blobs, plan.steps[0].index, len(plan.steps), plan.digest)
        try:
            async for event in stream:
                match event["kind"]:
                    case "accepted":
                        await reporter.placed(event["gang"], plan, self.step_cache_report())
                        await reporter.entered(JobState.DENOISING)
                    case "step":
                        reporter.stepped(event["done"])
                    case "result":
                        self._ranks = event["ranks"]
                        return event["latents"], event["seconds"]
        finally:
            stream.cancel()
        raise GangLost("the gang ended its stream without a result")

    def _task(self) -> VideoTask:
        params = self._job.params
        low_noise = params.guidance_scale if params.guidance_scale_2 is None else params.guidance_scale_2
        return VideoTask(
            job=self._job.id,
            plan=self.plan,
            solver=self._solver,
            latent_shape=self._services.latent_shape(params),
            seed=params.seed,
            guidance=(params.guidance_scale, low_noise),
            checkpoint_every=self._checkpoint_every,
            donor_steps=self._donor_steps,
        )


def load_saved_state(storage: Storage, job_id: str) -> SavedState | None:
    """The job's latest saved state, None without a usable one: then it starts again from its seed."""
    key = solver_state_key(job_id)
    if not storage.exists(key):
        return None
    try:
        return SavedState.from_bytes(storage.read_bytes(key))
    except (KeyError, ValueError) as error:
        logger.warning("job %s starts from its first step: its saved solver state cannot be read: %r", job_id, error)
        return None
