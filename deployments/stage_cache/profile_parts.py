"""The parts of a profile: which weights, which requests, how the schedule is decided, and what each stage needs."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StringConstraints, model_validator

from deployments.plan import Branch
from deployments.stage_cache.closed import Closed, Sha256
from deployments.stage_cache.fit import SignalFit
from deployments.stage_cache.predictor import Predictor


class ModelIdentity(Closed):
    """The weights a profile was measured on, pinned by a hub revision, by their bytes, or both."""

    repo: str | None = Field(None, description="Hub id; needs `revision`.")
    revision: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{40}$")] | None = Field(None, description="Commit.")
    fingerprint: Sha256 | None = Field(None, description="SHA-256 over the checkpoint's weight files.")
    dtype: Literal["bfloat16", "float32"]
    layers: int = Field(ge=1)
    heads: int = Field(ge=1)
    head_dim: int = Field(ge=1)
    in_channels: int = Field(ge=1)

    @model_validator(mode="after")
    def _weights_are_pinned(self) -> ModelIdentity:
        if (self.repo is None) != (self.revision is None):
            raise ValueError("model: repo and revision belong together; give both or neither")
        if self.revision is None and self.fingerprint is None:
            raise ValueError("model: nothing pins the weights; give repo and revision, or fingerprint")
        return self


class RequestShape(Closed):
    """The requests a profile holds for; all others run native.  Names are those of a video request."""

    width: int = Field(ge=16, description="Pixels.")
    height: int = Field(ge=16, description="Pixels.")
    num_frames: int = Field(ge=1)
    num_inference_steps: int = Field(ge=1)
    guidance_scale: tuple[float, float] = Field(description="Smallest and largest; both above 1, so guidance is on.")
    flow_shift: float = Field(gt=0)
    scheduler: str = Field(description="Class name, UniPCMultistepScheduler for instance.")
    solver_order: int = Field(ge=1)
    timesteps_sha256: Sha256 = Field(description="`timestep_signal.timesteps_sha256` of the solver's timesteps.")

    @model_validator(mode="after")
    def _guidance_is_on(self) -> RequestShape:
        low, high = self.guidance_scale
        if not 1 < low <= high:
            raise ValueError(f"guidance_scale: got {[low, high]}, expected 1 < smallest <= largest")
        return self


class TeaCacheDecision(Closed):
    """The schedule follows from every stage's polynomial and one threshold."""

    decision: Literal["teacache_timestep"] = "teacache_timestep"
    threshold: float = Field(ge=0, le=1, description="Accumulated relative residual change, no unit.")
    clamp_negative: bool = Field(True, description="False: the official rule, whose extrapolation can be free.")
    plan: tuple[int, ...] | None = Field(None, description="If given, the derived hits have to be these.")


class ScheduleDecision(Closed):
    """The schedule is a list of steps."""

    decision: Literal["schedule"] = "schedule"
    plan: tuple[int, ...] = Field(description="Steps that reuse, increasing.")


class ErrorLimit(Closed):
    """The calibrated prediction error of one full step."""

    branch: Branch
    step: int = Field(ge=1)
    limit: float = Field(gt=0, description="Quantile over calibration videos of |r - r^| / |r|.")


class GuardRule(Closed):
    """When error feedback makes the rest of a request full: error > limit * factor, or an error that is not finite."""

    quantile: float = Field(0.995, gt=0, lt=1, description="Of the calibration errors, gives every `limit`.")
    factor: float = Field(1.5, ge=1)


class StageProfile(Closed):
    """What one stage of one partition needs."""

    stage: int = Field(ge=0)
    layers: tuple[int, int] = Field(description="Its blocks: first, and one past the last.")
    fit: SignalFit | None = Field(None, description="Needed by a teacache_timestep decision; else a load-time guard.")
    predictor: Predictor
    error_limits: tuple[ErrorLimit, ...] = Field((), description="Full steps that are checked.")


class Partition(Closed):
    """The stages of one pipeline, first to last."""

    stages: tuple[StageProfile, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _stages_are_in_order(self) -> Partition:
        start = 0
        for position, stage in enumerate(self.stages):
            if stage.stage != position or stage.layers[0] != start or stage.layers[1] <= start:
                raise ValueError(
                    f"stages: place {position} holds stage {stage.stage} with layers {list(stage.layers)}, expected "
                    f"stage {position} with layers from {start}; stages missing or swapped"
                )
            start = stage.layers[1]
        return self

    @property
    def split(self) -> tuple[int, ...]:
        """Blocks of each stage."""
        return tuple(stage.layers[1] - stage.layers[0] for stage in self.stages)
