"""A native video and its cached twin, compared; and a set of pairs brought to the values of the gates."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from app.jobs.prompt_set import Video
from app.quality import psnr, ssim, temporal_error
from deployments.stage_cache.closed import Closed
from deployments.stage_cache.gates import GateValues

Frames = NDArray[np.uint8]
"""[F, H, W, 3] RGB as served, before any video encoding."""


class PairQuality(Closed):
    """How far one cached video is from its native twin."""

    prompt: str
    seed: int
    ssim: float
    temporal_error: float
    motion: float = Field(description="mean|dx| of the native video, 0 to 1; a small one makes temporal_error large.")
    psnr: float | None = Field(description="dB; None for equal frames.")
    latent_max_abs: float
    latent_rmse: float
    latent_relative_l2: float


class Side(Closed):
    """What one of the two runs cost, in seconds of the whole request."""

    total: float
    text: float
    denoise: float
    decode: float
    file: float


class TimedPair(Closed):
    """One video run native and cached in one loaded gang."""

    quality: PairQuality
    native: Side
    cached: Side
    native_first: bool


def compare(video: Video, native: tuple[Frames, Tensor], cached: tuple[Frames, Tensor]) -> PairQuality:
    """Frames and latents [1, C, F, H, W] of both runs of `video`."""
    x, y = native[0] / 255.0, cached[0] / 255.0
    difference = (cached[1] - native[1]).double()
    ratio = psnr(x, y)
    return PairQuality(
        prompt=video.prompt,
        seed=video.seed,
        ssim=ssim(x, y),
        temporal_error=temporal_error(x, y),
        motion=float(np.abs(np.diff(x, axis=0)).mean()),
        psnr=ratio if np.isfinite(ratio) else None,
        latent_max_abs=float(difference.abs().max()),
        latent_rmse=float(difference.square().mean().sqrt()),
        latent_relative_l2=float(difference.norm() / native[1].double().norm()),
    )


def mean_temporal_error(pairs: Sequence[PairQuality]) -> float:
    """Arithmetic mean over videos: the value of the gate."""
    return float(np.mean([pair.temporal_error for pair in pairs]))


def gate_values(pairs: Sequence[PairQuality], latency_ratio: float) -> GateValues:
    """No video is left out."""
    return GateValues(
        videos=len(pairs),
        mean_ssim=float(np.mean([pair.ssim for pair in pairs])),
        min_video_ssim=min(pair.ssim for pair in pairs),
        mean_temporal_error_ratio=mean_temporal_error(pairs),
        latency_ratio=latency_ratio,
    )


def latency_ratio(pairs: Sequence[TimedPair]) -> float:
    """Sum of cached over sum of native whole-request seconds."""
    return sum(pair.cached.total for pair in pairs) / sum(pair.native.total for pair in pairs)


def latency_interval(pairs: Sequence[TimedPair], seed: int = 0, resamples: int = 10_000) -> tuple[float, float]:
    """95 % bootstrap interval of `latency_ratio`; pairs stay whole: a loaded machine slows both sides."""
    native = np.array([pair.native.total for pair in pairs])
    cached = np.array([pair.cached.total for pair in pairs])
    drawn = np.random.default_rng(seed).integers(0, len(pairs), size=(resamples, len(pairs)))
    low, high = np.quantile(cached[drawn].sum(1) / native[drawn].sum(1), (0.025, 0.975))
    return float(low), float(high)
