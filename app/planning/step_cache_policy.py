"""Which steps of a video reuse: a profile that has been checked against the served model, asked once a request."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from app.config import CacheConfig, VideoModel
from app.driver.job_state import VideoParams
from deployments.stage_cache.evidence import Status
from deployments.stage_cache.frozen_profile import open_profile
from deployments.stage_cache.native_reason import NativeReason
from deployments.stage_cache.profile import Profile, ServedModel
from deployments.stage_cache.skip_schedule import Schedule
from deployments.stage_cache.timestep_signal import TimeEmbedder, relative_changes, timesteps_sha256
from deployments.stage_cache.variant import refuse_unsupported
from deployments.wan.checkpoint import WanCheckpoint, split_blocks
from deployments.wan.checkpoint_files import read_json, read_tensor
from deployments.wan.solver_spec import SolverSpec


@dataclass(frozen=True)
class StepCacheDecision:
    """What one request reuses."""

    reuse: tuple[int, ...]
    native: NativeReason | None
    """Why nothing is reused, None otherwise."""


@dataclass(frozen=True)
class StepCachePolicy:
    """Made by `open_policy`; picklable, so that the driver can hold it."""

    profile: Profile
    status: Status
    schedule: Schedule
    """Of every request that fits."""

    def decide(self, params: VideoParams, solver: SolverSpec, start: int) -> StepCacheDecision:
        """start: the first step that will be computed; residuals from before it do not exist."""
        if params.step_cache == "off":
            return StepCacheDecision((), NativeReason("off", "step_cache: off, as the request asked"))
        timesteps = solver.build(torch.device("cpu")).timesteps.tolist()
        unfit = self.profile.fits(params, timesteps_sha256(timesteps))
        if unfit is not None:
            return StepCacheDecision((), unfit)
        schedule = self.schedule if start == 0 else self.profile.resumed(self.schedule, start)
        if not schedule.reuse:
            return StepCacheDecision((), NativeReason("resumed", f"too few steps are left after a resume at {start}"))
        return StepCacheDecision(schedule.reuse, None)


def open_policy(config: CacheConfig, model: VideoModel, checkpoint: WanCheckpoint, fingerprint: str) -> StepCachePolicy:
    """Read the profile and refuse it where it is not for this server.

    Raises what `open_profile` raises, UnsupportedVariant for a model no profile can serve, ProfileRefused for one that
    was measured on something else.
    """
    transformer = checkpoint.transformer_config("transformer")
    refuse_unsupported(read_json(checkpoint.folder, "model_index.json"), transformer, model.dtype)
    opened = open_profile(Path(config.wan_profile), config.allow_unqualified)
    profile, topology = opened.profile, model.topology
    profile.check_served(
        ServedModel(
            repo=model.checkpoint if model.revision else None,
            revision=model.revision,
            fingerprint=fingerprint,
            dtype=model.dtype,
            layers=checkpoint.num_blocks,
            heads=transformer["num_attention_heads"],
            head_dim=transformer["attention_head_dim"],
            in_channels=transformer["in_channels"],
            split=tuple(len(blocks) for blocks in split_blocks(checkpoint.num_blocks, topology.pp, topology.split)),
            cfg=topology.cfg,
            scheduler=checkpoint.scheduler,
            solver_order=checkpoint.scheduler_config.get("solver_order", 1),
        )
    )
    planned = profile.planned(_changes(profile, checkpoint))
    return StepCachePolicy(profile, opened.status, planned.schedule)


def _changes(profile: Profile, checkpoint: WanCheckpoint) -> tuple[float, ...] | None:
    """How the served model's own timestep signal moves over the profile's steps; None if the profile never asks."""
    signals = {stage.fit.signal for part in profile.partitions for stage in part.stages if stage.fit is not None}
    if not signals:
        return None
    request = profile.request
    spec = SolverSpec(
        checkpoint.scheduler,
        checkpoint.scheduler_config,
        request.num_inference_steps,
        request.flow_shift,
        checkpoint.boundary_ratio,
    )
    timesteps = spec.build(torch.device("cpu")).timesteps.tolist()
    weights = {
        name: read_tensor(checkpoint.folder, tensor)
        for name, tensor in checkpoint.tensors["transformer"].items()
        if name.startswith("condition_embedder.time_")
    }
    return relative_changes(TimeEmbedder.from_weights(weights).signal(signals.pop(), timesteps))
