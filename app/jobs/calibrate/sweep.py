"""Single-skip sensitivity: what one reused step costs, every other step being full.

    S_i = temporal error of the video in which step i alone is predicted from steps i-1 and i-2

The native run keeps its solver states and residuals, so each skip starts at its own step and not at the beginning.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from pydantic import Field
from torch import Tensor

from app.jobs.calibrate.studio import Studio
from app.jobs.prompt_set import Video
from app.jobs.video_pair import compare
from deployments.plan import BRANCHES, Branch
from deployments.stage_cache.closed import Closed
from deployments.stage_cache.predictor import Predictor, apply, residual
from deployments.wan.solver import Solver
from deployments.wan.solver_state import SolverState
from deployments.wan.stage import RunBlocks

FIRST_SWEPT = 2
"""Two full steps come first."""
TINY = 1e-12
"""Of an error of 0, so that it has a logarithm."""


class Skip(Closed):
    """One skipped step of one video."""

    prompt: str
    seed: int
    step: int = Field(ge=FIRST_SWEPT)
    temporal_error: float
    ssim: float
    latent_relative_l2: float


@dataclass(frozen=True)
class SweepVideo:
    """A `Task`: the skips of one video, in one stage.  predictor: of the whole model."""

    video: Video
    steps: tuple[int, ...]
    predictor: Predictor

    def __call__(self, studio: Studio) -> list[Skip]:
        """See the class."""
        chain, prepared = studio.chain(1), studio.prepared(1, self.video.prompt)
        native = _NativeRun()
        chain.run(prepared, self.video.seed, native.runner, native.before_step)
        reference = studio.native(self.video)
        found = []
        for step in self.steps:
            skip = _OneSkip(step, native, self.predictor, chain.sigmas)
            latents = chain.run(prepared, native.states[step], skip.runner).latents
            quality = compare(self.video, reference, (studio.decode(latents), latents))
            found.append(
                Skip(
                    prompt=self.video.prompt,
                    seed=self.video.seed,
                    step=step,
                    temporal_error=quality.temporal_error,
                    ssim=quality.ssim,
                    latent_relative_l2=quality.latent_relative_l2,
                )
            )
        return found


class _NativeRun:
    """Keeps the solver state before each step and the residual of each step."""

    def __init__(self) -> None:
        self.states: dict[int, SolverState] = {}
        self.residuals: dict[tuple[Branch, int], Tensor] = {}

    def before_step(self, step: int, solver: Solver, latents: Tensor) -> None:
        tensors, numbers = solver.state()  # solver tensors are never written in place, so no copy is needed
        self.states[step] = SolverState(step, latents, tensors, numbers)

    def runner(self, branch: Branch, stage: int, step: int) -> RunBlocks:
        return partial(self._run, branch, step)

    def _run(self, branch: Branch, step: int, hidden: Tensor, blocks: Callable[[Tensor], Tensor]) -> Tensor:
        output = blocks(hidden)
        self.residuals[branch, step] = residual(hidden, output)
        return output


class _OneSkip:
    """Predicts one step from the native residuals before it."""

    def __init__(self, step: int, native: _NativeRun, predictor: Predictor, sigmas: tuple[float, ...]) -> None:
        anchors = (step - 1, step - 2)[: predictor.anchors]
        self._step = step
        self._kept = {branch: [native.residuals[branch, anchor] for anchor in anchors] for branch in BRANCHES}
        self._weights = {branch: predictor.weights(branch, step, anchors, sigmas) for branch in BRANCHES}

    def runner(self, branch: Branch, stage: int, step: int) -> RunBlocks | None:
        if step != self._step:
            return None
        return lambda hidden, blocks: apply(hidden, self._kept[branch], self._weights[branch])


def sensitivities(skips: Sequence[Skip]) -> dict[int, float]:
    """S_i: mean temporal error over the videos, the quantity of the gate, by swept step."""
    by_step: dict[int, list[float]] = {}
    for skip in skips:
        by_step.setdefault(skip.step, []).append(skip.temporal_error)
    return {step: sum(errors) / len(errors) for step, errors in sorted(by_step.items())}


def interpolated(sensitivity: Mapping[int, float]) -> dict[int, float]:
    """Every step from the first to the last swept one; between swept steps the logarithm goes in a straight line."""
    steps = sorted(sensitivity)
    logs = np.log([max(sensitivity[step], TINY) for step in steps])
    every = range(steps[0], steps[-1] + 1)
    return dict(zip(every, np.exp(np.interp(every, steps, logs)).tolist(), strict=True))
