"""A video request and a topology become a `Plan`."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from deployments.plan import BRANCHES, Plan, Step


def video_plan(
    *,
    stages: int,
    chains: int,
    guidance_scale: float,
    experts: Sequence[int],
    start: int = 0,
    reuse: Collection[int] = (),
) -> Plan:
    """The plan of one video.

    guidance_scale: 1 or less leaves the negative branch out, as diffusers' `WanPipeline.do_classifier_free_guidance`.
    experts: the transformer of each solver step, `len(experts)` steps in all.
    start: first step to compute; earlier ones come from a saved solver state.
    reuse: steps whose residual the step cache predicts; all others run their blocks.
    """
    branches = BRANCHES if guidance_scale > 1 else BRANCHES[:1]
    steps = tuple(
        Step(index, "reuse" if index in reuse else "full", experts[index]) for index in range(start, len(experts))
    )
    return Plan(stages, chains, branches, steps)
