"""All stages of a model in one process: a trajectory whose stage calls may be watched or replaced.

Stages cut blocks and change none, and a branch is computed alone, so latents equal those of a gang with the same split
bit for bit, whatever its number of chains.  Axes: C channel, F latent frame, H/W latent height and width, T tokens,
D width.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from diffusers.utils.torch_utils import randn_tensor
from torch import Tensor

from app.jobs.clip_settings import ClipSettings
from deployments.plan import BRANCHES, Branch
from deployments.stage_cache.anchors import AnchorStore
from deployments.stage_cache.predictor import Predictor
from deployments.stage_cache.skip_schedule import Schedule
from deployments.stage_cache.step_cache import ErrorLimits, StepCache
from deployments.wan.checkpoint import WanCheckpoint, split_blocks
from deployments.wan.memory_plan import DTYPES
from deployments.wan.solver import Solver
from deployments.wan.solver_state import SolverState
from deployments.wan.stage import Conditioning, RunBlocks
from deployments.wan.stage_loading import load_stages

Runner = Callable[[Branch, int, int], RunBlocks | None]
"""(branch, stage, step) -> what calls that stage's blocks or predicts their output; None calls them."""


@dataclass(frozen=True)
class Prepared:
    """What a request computes once: the conditioning of each stage, by branch."""

    conditioning: Mapping[Branch, Sequence[Conditioning]]


@dataclass(frozen=True)
class Trajectory:
    """One finished run."""

    latents: Tensor
    """[1, C, F, H, W] fp32 on the CPU."""
    step_seconds: list[float]
    """Of each step that was computed; the device is waited for after each, so their sum is no latency."""


class StageChain:
    """pp: number of stages, split as a gang of that size splits."""

    def __init__(
        self,
        checkpoint: WanCheckpoint,
        pp: int,
        dtype: Literal["float32", "bfloat16"],
        device: torch.device,
        clip: ClipSettings,
    ) -> None:
        split = split_blocks(checkpoint.num_blocks, pp, None)
        # A profile is for models with one expert, so each range gives one stage.
        self.stages = [load_stages(checkpoint, blocks, DTYPES[dtype], device)[0] for blocks in split]
        self._device, self._clip = device, clip
        self._spec, self._shape = clip.solver(checkpoint), clip.latent_shape(checkpoint)

    @property
    def sigmas(self) -> tuple[float, ...]:
        """The solver's, one more than steps."""
        return Solver(self._spec, torch.device("cpu")).sigmas

    @torch.inference_mode()
    def prepare(self, text: Mapping[Branch, Tensor]) -> Prepared:
        """text: [1, L, text_dim] of both branches."""
        return Prepared(
            {
                branch: [stage.prepare(text[branch].to(self._device), self._shape) for stage in self.stages]
                for branch in BRANCHES
            }
        )

    @torch.inference_mode()
    def run(
        self,
        prepared: Prepared,
        start: int | SolverState,
        runner: Runner | None = None,
        before_step: Callable[[int, Solver, Tensor], None] | None = None,
    ) -> Trajectory:
        """start: the seed of a whole run, or a state to go on from.

        before_step: called with the step, the solver and the latents that enter the step.
        """
        if isinstance(start, SolverState):
            first, solver = start.step, Solver(self._spec, self._device, start.step)
            solver.load_state(dict(start.tensors), dict(start.numbers))
            latents = start.latents.to(self._device)
        else:
            first, solver = 0, Solver(self._spec, self._device)
            noise = torch.Generator("cpu").manual_seed(start)
            latents = randn_tensor(self._shape, noise, self._device, torch.float32)
        seconds = []
        for step in range(first, self._spec.steps):
            began = time.perf_counter()
            if before_step is not None:
                before_step(step, solver, latents)
            latents = self._step(prepared, solver, step, latents, runner)
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            seconds.append(time.perf_counter() - began)
        return Trajectory(latents.cpu(), seconds)

    def _step(self, prepared: Prepared, solver: Solver, step: int, latents: Tensor, runner: Runner | None) -> Tensor:
        timestep = solver.timesteps[step].expand(1)
        times = [stage.time(timestep) for stage in self.stages]
        out: dict[Branch, Tensor] = {}
        for branch in BRANCHES:
            x = latents
            for index, (stage, conditioning) in enumerate(zip(self.stages, prepared.conditioning[branch], strict=True)):
                x = stage(x, conditioning, times[index], runner(branch, index, step) if runner else None)
            out[branch] = x
        guided = out["negative"] + self._clip.guidance_scale * (out["positive"] - out["negative"])
        return solver.step(step, guided, latents)


class CachedRunner:
    """The step cache of every stage of a chain, for one run; a guard that trips ends the reuse of all of them.

    `runner` and `before_step` are those of `StageChain.run`.
    """

    _REQUEST = 1

    def __init__(
        self,
        chain: StageChain,
        prepared: Prepared,
        schedule: Schedule,
        predictors: Sequence[Predictor],
        limits: Sequence[ErrorLimits],
        device: torch.device,
    ) -> None:
        """predictors, limits: one a stage."""
        self.trips = 0
        self._caches = []
        for index, (predictor, allowed) in enumerate(zip(predictors, limits, strict=True)):
            conditioning = prepared.conditioning["positive"][index]
            stage = chain.stages[index]
            hidden_bytes = conditioning.rotary[0].shape[1] * stage.width * stage.dtype.itemsize
            budget = hidden_bytes * predictor.anchors * len(BRANCHES)
            cache = StepCache(predictor, AnchorStore(budget), device, allowed)
            if schedule.reuse:
                refused = cache.admit(self._REQUEST, schedule, chain.sigmas, hidden_bytes)
                assert refused is None, refused  # the budget is exactly what one request needs
            self._caches.append(cache)
        self._live = bool(schedule.reuse)
        self._tripped = False
        self.hits: dict[tuple[int, Branch], int] = {}
        """Reused steps so far, by stage and branch."""
        self._schedule = schedule

    def runner(self, branch: Branch, stage: int, step: int) -> RunBlocks | None:
        """Asks the stage's cache."""
        if not self._live:
            return None
        if self._schedule.reuses(step):
            self.hits[stage, branch] = self.hits.get((stage, branch), 0) + 1
        return partial(self._caches[stage].run, self._REQUEST, branch, step)

    def before_step(self, step: int, solver: Solver, latents: Tensor) -> None:
        """Looks at the guards; as in a gang, a trip holds from the step after the one in which it is seen."""
        if not self._live:
            return
        if self._tripped:
            self._live = False
            return
        if any(cache.trip(self._REQUEST, step) is not None for cache in self._caches):
            self._tripped, self.trips = True, 1
