"""A step cache for timing: any weights, any steps.  Speed does not depend on them; quality does, and none is claimed.

It does all that a profile's does: residuals are kept at the anchors, hits predict from two of them, and every full step
between them is checked; no check ever trips.
"""

from __future__ import annotations

import math

import torch

from deployments.plan import BRANCHES
from deployments.stage_cache.anchors import AnchorStore
from deployments.stage_cache.predictor import Linear
from deployments.stage_cache.step_cache import StepCache

BUDGET_BYTES = 8 << 30
MOST_STEPS = 1000


def reused_steps(steps: int, count: int) -> tuple[int, ...]:
    """`count` steps of the middle, evenly spread, no two in a row.  Raises ValueError where so many do not fit."""
    candidates = range(max(2, steps // 5), steps - steps // 10, 2)
    if not 0 <= count <= len(candidates):
        raise ValueError(f"reuse: got {count} of {steps} steps, expected at most {len(candidates)}")
    return tuple(candidates[index * len(candidates) // count] for index in range(count))


def timing_step_cache(device: torch.device) -> StepCache:
    """Of one stage."""
    limits = {(branch, step): math.inf for branch in BRANCHES for step in range(MOST_STEPS)}
    return StepCache(Linear(), AnchorStore(BUDGET_BYTES), device, limits)
