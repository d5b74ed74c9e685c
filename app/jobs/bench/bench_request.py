"""The request that is timed, in the form each side takes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from app.jobs.bench.video_shape import VideoShape
from app.planning.video_plan import video_plan
from deployments.gang.conductor import Listener, Submission
from deployments.plan import Branch, Plan
from deployments.wan.checkpoint import WanCheckpoint
from deployments.wan.solver_spec import SolverSpec
from deployments.wan.video_task import VideoTask


@dataclass(frozen=True)
class BenchRequest:
    """One video; the flow shift is the checkpoint's."""

    shape: VideoShape
    steps: int
    seed: int
    guidance_scale: float
    max_sequence_length: int
    prompt: str = "a red circle moving right"
    reuse: tuple[int, ...] = ()
    """Steps that the step cache predicts."""

    def plan(self, checkpoint: WanCheckpoint, pp: int, cfg: int) -> Plan:
        """Its plan on a gang of pp * cfg ranks."""
        experts = self._solver(checkpoint).experts()
        return video_plan(stages=pp, chains=cfg, guidance_scale=self.guidance_scale, experts=experts, reuse=self.reuse)

    def submission(
        self,
        key: str,
        checkpoint: WanCheckpoint,
        plan: Plan,
        text: Mapping[Branch, Tensor],
        listener: Listener,
    ) -> Submission:
        """What a conductor is given.  text: embeddings of each branch, [1, L, text_dim]."""
        task = VideoTask(
            job=key,
            plan=plan,
            solver=self._solver(checkpoint),
            latent_shape=self.shape.latents(checkpoint.vae_config["z_dim"]),
            seed=self.seed,
            guidance=(self.guidance_scale, self.guidance_scale),
            checkpoint_every=0,
        )
        spec = {"task": task.to_json(), "resume": None}
        tensors = {f"text.{branch}": embedding for branch, embedding in text.items()}
        return Submission(key, spec, tensors, 0, len(plan.steps), plan.digest, listener)

    def _solver(self, checkpoint: WanCheckpoint) -> SolverSpec:
        config = checkpoint.scheduler_config
        return SolverSpec(checkpoint.scheduler, config, self.steps, checkpoint.flow_shift, checkpoint.boundary_ratio)
