"""What the jobs of the step cache ask of a model in every run: all of a request but its prompt and seed."""

from __future__ import annotations

from collections.abc import Collection

import torch
from pydantic import Field

from app.planning.video_plan import video_plan
from deployments.plan import Plan
from deployments.stage_cache.closed import Closed
from deployments.stage_cache.profile_parts import RequestShape
from deployments.stage_cache.timestep_signal import timesteps_sha256
from deployments.wan.checkpoint import WanCheckpoint
from deployments.wan.solver_spec import SolverSpec
from deployments.wan.video_task import VideoTask


class ClipSettings(Closed):
    """Names are those of a video request."""

    width: int = Field(ge=16, multiple_of=16, description="Pixels.")
    height: int = Field(ge=16, multiple_of=16, description="Pixels.")
    num_frames: int = Field(ge=5, description="4k + 1; one frame has no motion to judge.")
    num_inference_steps: int = Field(ge=1)
    guidance_scale: float = Field(gt=1, description="Guidance is on: the step cache serves no other request.")
    flow_shift: float = Field(gt=0)
    negative_prompt: str = ""
    max_sequence_length: int = Field(512, ge=1, description="Text tokens.")
    fps: int = Field(8, ge=1, description="Of the mp4 that a timed request writes.")

    def solver(self, checkpoint: WanCheckpoint) -> SolverSpec:
        """The solver of every run."""
        return SolverSpec(
            checkpoint.scheduler,
            checkpoint.scheduler_config,
            self.num_inference_steps,
            self.flow_shift,
            checkpoint.boundary_ratio,
        )

    def timesteps(self, checkpoint: WanCheckpoint) -> list[float]:
        """The solver's, as the timestep signal and the profile take them."""
        return [float(t) for t in self.solver(checkpoint).build(torch.device("cpu")).timesteps.tolist()]

    def latent_shape(self, checkpoint: WanCheckpoint) -> tuple[int, int, int, int, int]:
        """(1, C, F, H, W)."""
        vae = checkpoint.vae_config
        frames = (self.num_frames - 1) // int(vae["scale_factor_temporal"]) + 1
        pixels = int(vae["scale_factor_spatial"])
        return 1, int(vae["z_dim"]), frames, self.height // pixels, self.width // pixels

    def plan(self, checkpoint: WanCheckpoint, pp: int, cfg: int, reuse: Collection[int]) -> Plan:
        """The plan of one run in a topology."""
        experts = self.solver(checkpoint).experts()
        return video_plan(stages=pp, chains=cfg, guidance_scale=self.guidance_scale, experts=experts, reuse=reuse)

    def task(self, checkpoint: WanCheckpoint, job: str, seed: int, plan: Plan) -> VideoTask:
        """What a gang is given."""
        guidance = (self.guidance_scale, self.guidance_scale)
        return VideoTask(job, plan, self.solver(checkpoint), self.latent_shape(checkpoint), seed, guidance, 0)

    def request_shape(self, checkpoint: WanCheckpoint) -> RequestShape:
        """What a profile measured with these settings holds for."""
        return RequestShape(
            width=self.width,
            height=self.height,
            num_frames=self.num_frames,
            num_inference_steps=self.num_inference_steps,
            guidance_scale=(self.guidance_scale, self.guidance_scale),
            flow_shift=self.flow_shift,
            scheduler=checkpoint.scheduler,
            solver_order=int(checkpoint.scheduler_config.get("solver_order", 1)),
            timesteps_sha256=timesteps_sha256(self.timesteps(checkpoint)),
        )
