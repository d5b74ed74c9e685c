"""Collection: one native run of every video gives its reference and the statistics of every split.

The stages of the deepest split are run; the residual of a stage of a shallower split is what its blocks add together,
so one pass serves all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pydantic import Field
from torch import Tensor

from app.jobs.calibrate.studio import Studio
from app.jobs.prompt_set import Video
from deployments.plan import Branch
from deployments.stage_cache.closed import Closed
from deployments.stage_cache.residual_stats import Anchored, ResidualCollector, Transition
from deployments.wan.checkpoint import split_blocks
from deployments.wan.stage import RunBlocks

PIPELINES = (1, 2)
"""Numbers of stages that profiles are calibrated for."""


class StageRows(Closed):
    """The statistics of one stage of one split."""

    pp: int = Field(ge=1)
    stage: int = Field(ge=0)
    transitions: tuple[Transition, ...]
    anchored: tuple[Anchored, ...]


class VideoRows(Closed):
    """The statistics of one native video."""

    prompt: str
    seed: int
    stages: tuple[StageRows, ...]
    step_seconds: tuple[float, ...]
    """One a step; the device is waited for."""


@dataclass(frozen=True)
class CollectVideo:
    """A `Task`: run one video natively, keep its latents and frames, return its statistics."""

    video: Video

    def __call__(self, studio: Studio) -> VideoRows:
        """See the class."""
        deepest = PIPELINES[-1]
        chain = studio.chain(deepest)
        watch = _ResidualWatch(studio.checkpoint.num_blocks, deepest)
        prepared = studio.prepared(deepest, self.video.prompt)
        run = chain.run(prepared, self.video.seed, watch.runner)
        studio.save_native(self.video, run.latents, studio.decode(run.latents))
        return VideoRows(
            prompt=self.video.prompt,
            seed=self.video.seed,
            stages=tuple(watch.finish()),
            step_seconds=tuple(run.step_seconds),
        )


class _ResidualWatch:
    """Collectors for the stages of every split, fed from the calls of the deepest one's stages."""

    def __init__(self, num_blocks: int, deepest: int) -> None:
        self._ends = [blocks.stop for blocks in split_blocks(num_blocks, deepest, None)]
        starts = [blocks.start for blocks in split_blocks(num_blocks, deepest, None)]
        self._begin = starts
        self._stages: list[tuple[int, int, range, ResidualCollector]] = []
        for pp in PIPELINES:
            for stage, blocks in enumerate(split_blocks(num_blocks, pp, None)):
                if blocks.start not in starts or blocks.stop not in self._ends:
                    raise ValueError(f"pp: the stages of {pp} are not made of whole stages of {deepest}")
                self._stages.append((pp, stage, blocks, ResidualCollector(stage)))
        self._entered: dict[int, Tensor] = {}
        """Hidden state that enters a block, by block, of the branch and step that runs."""

    def runner(self, branch: Branch, stage: int, step: int) -> RunBlocks:
        """Runs the blocks and looks at what went in and came out."""

        def run(hidden: Tensor, blocks: Callable[[Tensor], Tensor]) -> Tensor:
            self._entered[self._begin[stage]] = hidden
            output = blocks(hidden)
            for _, _, held, collector in self._stages:
                if held.stop == self._ends[stage]:
                    collector.add(branch, step, output - self._entered[held.start])
            return output

        return run

    def finish(self) -> list[StageRows]:
        """All statistics; waits for the device."""
        found = []
        for pp, stage, _, collector in self._stages:
            transitions, anchored = collector.finish()
            found.append(StageRows(pp=pp, stage=stage, transitions=tuple(transitions), anchored=tuple(anchored)))
        return found
