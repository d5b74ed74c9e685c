"""The four gates a step cache has to pass in every topology, and how a failed candidate is ranked.

    mean_ssim >= .95    min_video_ssim >= .90    mean_temporal_error_ratio <= .10    latency_ratio <= .90

The values are those of `app.quality` (native against cached, same prompt and seed) and of whole-request seconds, sum of
cached over sum of native.  They are compared unrounded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from pydantic import Field

from deployments.stage_cache.closed import Closed


class GateLimits(Closed):
    """Bounds of the four gates; each bound itself passes."""

    mean_ssim: float
    min_video_ssim: float
    mean_temporal_error_ratio: float
    latency_ratio: float


GATES = GateLimits(mean_ssim=0.95, min_video_ssim=0.90, mean_temporal_error_ratio=0.10, latency_ratio=0.90)
"""What acceptance demands."""
FREEZE_MARGINS = GateLimits(mean_ssim=0.955, min_video_ssim=0.91, mean_temporal_error_ratio=0.085, latency_ratio=0.87)
"""What calibration should show before a profile is frozen, so that unseen prompts do not decide by luck."""


class GateValues(Closed):
    """Measured on one topology."""

    videos: int = Field(ge=1)
    mean_ssim: float = Field(ge=-1, le=1)
    min_video_ssim: float = Field(ge=-1, le=1)
    mean_temporal_error_ratio: float = Field(ge=0)
    latency_ratio: float = Field(gt=0)

    def failures(self, limits: GateLimits = GATES) -> dict[str, str]:
        """Failed gates by JUnit case name, each with its value and the required relation; empty if all pass."""
        at_least = ("mean_ssim", "min_video_ssim")
        failed = {}
        for gate in GateLimits.model_fields:
            value, bound = getattr(self, gate), getattr(limits, gate)
            if (value < bound) if gate in at_least else (value > bound):
                failed[gate] = f"{value!r}, required {'>=' if gate in at_least else '<='} {bound!r}"
        return failed

    @property
    def score(self) -> float:
        """max over the gates of how far each is from its bound: at most 1 exactly if all pass, smaller is better.

        An SSIM of 0 or less scores infinity.
        """
        if min(self.mean_ssim, self.min_video_ssim) <= 0:
            return math.inf
        return max(
            GATES.mean_ssim / self.mean_ssim,
            GATES.min_video_ssim / self.min_video_ssim,
            self.mean_temporal_error_ratio / GATES.mean_temporal_error_ratio,
            self.latency_ratio / GATES.latency_ratio,
        )


def bootstrap_upper(values: Sequence[float], seed: int = 0, resamples: int = 10_000) -> float:
    """Upper end of the 95 % bootstrap interval of the mean: the 97.5th percentile of resampled means."""
    rng = np.random.default_rng(seed)
    data = np.asarray(values, dtype=np.float64)
    means = data[rng.integers(0, len(data), size=(resamples, len(data)))].mean(axis=1)
    return float(np.quantile(means, 0.975))
