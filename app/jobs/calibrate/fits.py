"""From collected statistics to predictors and profiles: what every stage of every split needs for a schedule."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

from pydantic import Field

from app.jobs.calibrate.collect import PIPELINES, VideoRows
from app.jobs.clip_settings import ClipSettings
from deployments.plan import BRANCHES
from deployments.stage_cache.closed import Closed
from deployments.stage_cache.coefficients import Signal
from deployments.stage_cache.fit import SignalFit, WeightFit, error_limits, fit_signal, least_squares, magnitude_ratios
from deployments.stage_cache.predictor import Hold, LeastSquares, Linear, Predictor, Scaled
from deployments.stage_cache.profile import Profile
from deployments.stage_cache.profile_parts import (
    ErrorLimit,
    GuardRule,
    ModelIdentity,
    Partition,
    ScheduleDecision,
    StageProfile,
)
from deployments.stage_cache.residual_stats import Anchored, Transition
from deployments.stage_cache.skip_schedule import Schedule, SkipLimits
from deployments.stage_cache.timestep_signal import TimeEmbedder, relative_changes
from deployments.wan.checkpoint import WanCheckpoint, split_blocks
from deployments.wan.checkpoint_files import read_tensor

PredictorKind = Literal["hold", "scaled", "linear", "ls2"]


class StageFit(Closed):
    """One stage of one split."""

    pp: int = Field(ge=1)
    stage: int = Field(ge=0)
    layers: tuple[int, int]
    signal: SignalFit
    ratios: Scaled
    weights: tuple[WeightFit, ...]
    """Of every (branch, step, anchors) collected."""


class Fits(Closed):
    """All stages, and what the predictors read besides."""

    videos: int
    changes: tuple[float, ...]
    """d_1 .. d_(N-1) of the timestep signal."""
    sigmas: tuple[float, ...]
    stages: tuple[StageFit, ...]

    def stage(self, pp: int, stage: int) -> StageFit:
        """Of one stage of one split."""
        return next(fit for fit in self.stages if (fit.pp, fit.stage) == (pp, stage))

    def predictor(self, kind: PredictorKind, pp: int, stage: int, schedule: Schedule) -> Predictor:
        """For one schedule: a least-squares table holds the rows of its hits and of the full steps before them."""
        if kind == "hold":
            return Hold()
        if kind == "linear":
            return Linear()
        fit = self.stage(pp, stage)
        if kind == "scaled":
            return fit.ratios
        wanted = {(step, schedule.anchors(step, 2)) for step in range(2, schedule.steps)}
        rows = tuple(weight.row for weight in fit.weights if (weight.row.step, weight.row.anchors) in wanted)
        return LeastSquares(table=rows)

    def predictors(self, kind: PredictorKind, pp: int, schedule: Schedule) -> tuple[Predictor, ...]:
        """One a stage."""
        return tuple(self.predictor(kind, pp, stage, schedule) for stage in range(pp))


def fit_all(videos: Sequence[VideoRows], checkpoint: WanCheckpoint, clip: ClipSettings, signal: Signal) -> Fits:
    """Fit every stage of every split."""
    sigmas = tuple(float(s) for s in clip.solver(checkpoint).build("cpu").sigmas.tolist())
    changes = timestep_changes(checkpoint, clip, signal)
    stages = []
    for pp in PIPELINES:
        for stage, blocks in enumerate(split_blocks(checkpoint.num_blocks, pp, None)):
            transitions, anchored = rows_of(videos, pp, stage)
            stages.append(
                StageFit(
                    pp=pp,
                    stage=stage,
                    layers=(blocks.start, blocks.stop),
                    signal=fit_signal(signal, changes, transitions),
                    ratios=magnitude_ratios(transitions, clip.num_inference_steps),
                    weights=tuple(least_squares(anchored, sigmas)),
                )
            )
    return Fits(videos=len(videos), changes=changes, sigmas=sigmas, stages=tuple(stages))


def timestep_changes(checkpoint: WanCheckpoint, clip: ClipSettings, signal: Signal) -> tuple[float, ...]:
    """d_1 .. d_(N-1) of the checkpoint's own time embedder over the solver's timesteps."""
    weights = {
        name: read_tensor(checkpoint.folder, tensor)
        for name, tensor in checkpoint.tensors["transformer"].items()
        if name.startswith("condition_embedder.time_")
    }
    return relative_changes(TimeEmbedder.from_weights(weights).signal(signal, clip.timesteps(checkpoint)))


def rows_of(videos: Iterable[VideoRows], pp: int, stage: int) -> tuple[list[Transition], list[Anchored]]:
    """The rows of one stage over all videos."""
    transitions: list[Transition] = []
    anchored: list[Anchored] = []
    for video in videos:
        for rows in video.stages:
            if (rows.pp, rows.stage) == (pp, stage):
                transitions += rows.transitions
                anchored += rows.anchored
    return transitions, anchored


def draft_profile(
    profile_id: str,
    identity: ModelIdentity,
    checkpoint: WanCheckpoint,
    clip: ClipSettings,
    fits: Fits,
    videos: Sequence[VideoRows],
    schedule: Schedule,
    kind: PredictorKind,
    limits: SkipLimits,
) -> Profile:
    """The profile of one schedule and predictor, for both splits, with error limits from the native videos."""
    guard = GuardRule()
    partitions = []
    for pp in PIPELINES:
        stages = []
        for stage in range(pp):
            fit, predictor = fits.stage(pp, stage), fits.predictor(kind, pp, stage, schedule)
            allowed = error_limits(rows_of(videos, pp, stage)[1], predictor, schedule, fits.sigmas, guard.quantile)
            stages.append(
                StageProfile(
                    stage=stage,
                    layers=fit.layers,
                    fit=fit.signal,
                    predictor=predictor,
                    error_limits=tuple(
                        ErrorLimit(branch=branch, step=step, limit=limit)
                        for (branch, step), limit in sorted(allowed.items())
                        if branch in BRANCHES and limit > 0
                    ),
                )
            )
        partitions.append(Partition(stages=tuple(stages)))
    return Profile(
        format="wan-stage-cache/1",
        profile_id=profile_id,
        model=identity,
        request=clip.request_shape(checkpoint),
        limits=limits,
        policy=ScheduleDecision(plan=schedule.reuse),
        partitions=tuple(partitions),
        cfg=(1, 2),
        guard=guard,
    )


def identity_of(
    checkpoint: WanCheckpoint,
    digest: str,
    dtype: Literal["float32", "bfloat16"],
    source: str,
    revision: str | None,
) -> ModelIdentity:
    """What pins the weights.  digest: `checkpoint.fingerprint`."""
    config = checkpoint.transformer_config("transformer")
    return ModelIdentity(
        repo=source if revision else None,
        revision=revision,
        fingerprint=digest,
        dtype=dtype,
        layers=checkpoint.num_blocks,
        heads=int(config["num_attention_heads"]),
        head_dim=int(config["attention_head_dim"]),
        in_channels=int(config["in_channels"]),
    )


def read_rows(path: Path) -> list[VideoRows]:
    """JSON lines of `VideoRows`."""
    return [VideoRows.model_validate_json(line) for line in path.read_text().splitlines()]
