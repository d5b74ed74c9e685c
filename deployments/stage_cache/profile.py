"""A profile: one measured step-cache policy for one model, request shape and solver, as a closed frozen record.

The schedule is the same in every topology; coefficients, weights and limits belong to the stages of one partition each.
What a profile proves is not written in it: evidence is a separate record that names the profile's digest, see
`evidence`, so that nothing about the profile changes when it passes.

Two rules hold for every profile: a step whose d leaves the calibrated range computes, and once its guard has tripped
the rest of a request is full.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Literal, Protocol

import yaml
from pydantic import Field, model_validator

from deployments.plan import BRANCHES, Branch
from deployments.stage_cache.closed import Closed
from deployments.stage_cache.native_reason import NativeReason
from deployments.stage_cache.profile_parts import (
    GuardRule,
    ModelIdentity,
    Partition,
    RequestShape,
    ScheduleDecision,
    StageProfile,
    TeaCacheDecision,
)
from deployments.stage_cache.skip_schedule import Planned, Schedule, SkipLimits, StageRule, teacache_schedule


class ProfileRefused(ValueError):
    """The profile is not for this server; the start stops with every reason."""


@dataclass(frozen=True)
class ServedModel:
    """What a server runs, for a profile to be checked against."""

    repo: str | None
    revision: str | None
    fingerprint: str
    dtype: str
    layers: int
    heads: int
    head_dim: int
    in_channels: int
    split: tuple[int, ...]
    cfg: int
    scheduler: str
    solver_order: int


class VideoRequest(Protocol):
    """The fields of a request that a profile looks at."""

    @property
    def width(self) -> int: ...
    @property
    def height(self) -> int: ...
    @property
    def num_frames(self) -> int: ...
    @property
    def num_inference_steps(self) -> int: ...
    @property
    def guidance_scale(self) -> float: ...
    @property
    def flow_shift(self) -> float: ...


class Profile(Closed):
    """See the module's docstring.  `digest` names it in evidence, in responses and between ranks."""

    format: Literal["wan-stage-cache/1"]
    profile_id: str = Field(pattern=r"^[a-zA-Z0-9][a-zA-Z0-9._-]{0,127}$")
    model: ModelIdentity
    request: RequestShape
    limits: SkipLimits
    policy: Annotated[TeaCacheDecision | ScheduleDecision, Field(discriminator="decision")]
    partitions: tuple[Partition, ...] = Field(min_length=1)
    cfg: tuple[Literal[1, 2], ...] = Field(min_length=1, description="Chains of stages it was calibrated for.")
    guard: GuardRule | None = None

    @property
    def topologies(self) -> tuple[str, ...]:
        """Names of the topologies it was made for: pp1-cfg1, pp1-cfg2, ..."""
        return tuple(topology_name(len(p.stages), cfg) for p in self.partitions for cfg in sorted(set(self.cfg)))

    @property
    def anchors(self) -> int:
        """Full steps a hit needs on its worst stage."""
        return max(stage.predictor.anchors for stage in self._stages)

    def partition(self, split: tuple[int, ...]) -> Partition:
        """The stages for these block counts; ProfileRefused if there are none."""
        for partition in self.partitions:
            if partition.split == split:
                return partition
        raise ProfileRefused(
            f"split: got {list(split)}, {self.profile_id} has {[list(p.split) for p in self.partitions]}"
        )

    def error_limits(self, stage: StageProfile) -> dict[tuple[Branch, int], float]:
        """Largest allowed error by branch and step of one of its stages; {} without a guard."""
        if self.guard is None:
            return {}
        return {(row.branch, row.step): row.limit * self.guard.factor for row in stage.error_limits}

    def planned(self, changes: Sequence[float] | None) -> Planned:
        """The schedule of a request that fits.  Raises ProfileRefused when it contradicts the profile.

        changes: d of the server's own model and timesteps (`timestep_signal`), needed if any stage has a fit.
        """
        steps = self.request.num_inference_steps
        fits = [stage.fit for stage in self._stages if stage.fit is not None]
        if fits and (changes is None or len(changes) != steps - 1):
            raise ProfileRefused(
                f"changes: got {'none' if changes is None else len(changes)}, {self.profile_id} needs {steps - 1}"
            )
        if isinstance(self.policy, ScheduleDecision):
            schedule = Schedule(steps, self.policy.plan)
            outside = [
                hit
                for hit in schedule.reuse
                for fit in fits
                if changes and not _inside(changes[hit - 1], fit.input_range)
            ]
            if outside:
                raise ProfileRefused(
                    f"plan: steps {sorted(set(outside))} reuse outside the calibrated input range; the server's time "
                    "embedder or timesteps are not those of the calibration"
                )
            return Planned(schedule, ())
        rules = [StageRule(fit.coefficients, fit.input_range) for fit in fits]
        planned = teacache_schedule(
            changes or (), rules, self.policy.threshold, self.limits, clamp=self.policy.clamp_negative
        )
        if self.policy.plan is not None and planned.schedule.reuse != self.policy.plan:
            raise ProfileRefused(
                f"plan: the server derives {list(planned.schedule.reuse)}, "
                f"{self.profile_id} has {list(self.policy.plan)}"
            )
        uncovered = self._uncovered(planned.schedule)
        if uncovered:
            raise ProfileRefused(f"plan: {uncovered}")
        return planned

    def resumed(self, schedule: Schedule, start: int) -> Schedule:
        """What is left of a schedule when a run begins at step ``start`` with no residual kept.

        A hit that would lack anchors of this run, or weights for the anchors it now has, becomes full.
        """
        kept: tuple[int, ...] = ()
        for hit in schedule.reuse:
            trial = Schedule(schedule.steps, (*kept, hit))
            if hit - start - len(kept) >= self.anchors and not self._uncovered(trial):
                kept = trial.reuse
        return Schedule(schedule.steps, kept)

    def check_served(self, served: ServedModel) -> None:
        """Raise ProfileRefused with every way in which the server is not the one the profile was measured on."""
        expected = {name: getattr(self.model, name) for name in ModelIdentity.model_fields}
        unpinned = {name for name in ("repo", "revision", "fingerprint") if expected[name] is None}
        expected |= {name: getattr(self.request, name) for name in ("scheduler", "solver_order")}
        wrong = [
            f"{name}: got {getattr(served, name)}, expected {value}"
            for name, value in expected.items()
            if name not in unpinned and getattr(served, name) != value
        ]
        splits = [partition.split for partition in self.partitions]
        if served.split not in splits:
            wrong.append(f"split: got {list(served.split)} ({len(served.split)} stages), expected one of {splits}")
        if served.cfg not in self.cfg:
            wrong.append(f"cfg: got {served.cfg}, expected one of {sorted(self.cfg)}")
        if wrong:
            raise ProfileRefused(
                f"profile {self.profile_id} is not for this server: {'; '.join(wrong)}. "
                f"Its topologies are {list(self.topologies)}"
            )

    def fits(self, request: VideoRequest, timesteps_sha256: str) -> NativeReason | None:
        """None if the profile holds for the request, else why it runs native.

        timesteps_sha256: of the timesteps this request's solver will take.
        """
        if request.guidance_scale <= 1:
            return NativeReason(
                "guidance_off", f"guidance_scale: got {request.guidance_scale}; without guidance no reuse"
            )
        low, high = self.request.guidance_scale
        if not low <= request.guidance_scale <= high:
            return self._unfit("guidance_scale", request.guidance_scale, f"{low} to {high}")
        for name in ("width", "height", "num_frames", "num_inference_steps", "flow_shift"):
            got, expected = getattr(request, name), getattr(self.request, name)
            if got != expected:
                return self._unfit(name, got, expected)
        if timesteps_sha256 != self.request.timesteps_sha256:
            return self._unfit("timesteps", timesteps_sha256[:12], self.request.timesteps_sha256[:12])
        return None

    def to_yaml(self) -> str:
        """The file form; `from_yaml` is the inverse, and both have one digest."""
        return str(yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, default_flow_style=None, width=120))

    @classmethod
    def from_yaml(cls, text: str) -> Profile:
        """Parse and validate; a pydantic ValidationError (a ValueError) names every wrong field."""
        return cls.model_validate(yaml.safe_load(text))

    @cached_property
    def _stages(self) -> tuple[StageProfile, ...]:
        return tuple(stage for partition in self.partitions for stage in partition.stages)

    def _unfit(self, field: str, got: object, expected: object) -> NativeReason:
        return NativeReason(field, f"{field}: got {got}, profile {self.profile_id} holds for {expected}")

    def _uncovered(self, schedule: Schedule) -> str | None:
        """The first hit that a stage's predictor has no numbers for."""
        for stage in self._stages:
            for hit in schedule.reuse:
                anchors = schedule.anchors(hit, stage.predictor.anchors)
                for branch in BRANCHES:
                    if not stage.predictor.covers(branch, hit, anchors):
                        return (
                            f"stage {stage.stage} (layers {list(stage.layers)}), branch {branch}: predictor "
                            f"{stage.predictor.kind} has no weights for step {hit} with anchors {list(anchors)}"
                        )
        return None

    @model_validator(mode="after")
    def _partitions_hold_the_model(self) -> Profile:
        splits = [partition.split for partition in self.partitions]
        if len({len(split) for split in splits}) != len(splits):
            raise ValueError(f"partitions: got splits {splits}, expected one for each number of stages")
        wrong = [split for split in splits if sum(split) != self.model.layers]
        if wrong:
            raise ValueError(f"partitions: splits {wrong} do not add up to model.layers = {self.model.layers}")
        return self

    @model_validator(mode="after")
    def _coefficients_are_there(self) -> Profile:
        if isinstance(self.policy, TeaCacheDecision):
            missing = [(len(p.stages), s.stage) for p in self.partitions for s in p.stages if s.fit is None]
            if missing:
                raise ValueError(
                    f"fit: missing for (pp, stage) {missing}; there is no qualified default for TeaCache coefficients, "
                    "calibrate them"
                )
        signals = {stage.fit.signal for stage in self._stages if stage.fit is not None}
        if len(signals) > 1:
            raise ValueError(f"fit: stages watch different signals {sorted(signals)}; one signal decides for all")
        return self

    @model_validator(mode="after")
    def _plan_obeys(self) -> Profile:
        if self.limits.min_anchors < self.anchors:
            raise ValueError(
                f"limits.min_anchors: got {self.limits.min_anchors}, the predictors need {self.anchors} full steps"
            )
        if self.policy.plan is not None:
            schedule = Schedule(self.request.num_inference_steps, self.policy.plan)
            self.limits.check(schedule)
            uncovered = self._uncovered(schedule)
            if uncovered:
                raise ValueError(f"plan: {uncovered}")
        return self

    @model_validator(mode="after")
    def _limits_have_a_guard(self) -> Profile:
        if self.guard is None and any(stage.error_limits for stage in self._stages):
            raise ValueError(
                "error_limits: given without `guard`, nothing would read them; add guard or leave them out"
            )
        return self


def topology_name(pp: int, cfg: int) -> str:
    """How evidence names a topology."""
    return f"pp{pp}-cfg{cfg}"


def _inside(value: float, bounds: tuple[float, float]) -> bool:
    return bounds[0] <= value <= bounds[1]
