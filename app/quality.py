"""How far a cached video is from its native twin: SSIM, temporal error and PSNR, on frames before any video encoding.

All functions take two videos of the same prompt and seed: native and cached, [F, H, W, 3] float RGB in [0, 1], as NumPy
arrays or CPU tensors.  They compute in fp64, so a value does not depend on the order of a sum in fp32.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

Video = NDArray[np.float64]

_WINDOW = 11
"""Pixels on a side of scikit-image's Gaussian window at sigma 1.5 (truncated at 3.5 sigma)."""


class QualityError(ValueError):
    """The two arrays are no pair of videos."""


def ssim(native: ArrayLike, cached: ArrayLike) -> float:
    """Mean over frames of the structural similarity (Wang et al. 2004), 1.0 for equal videos.

    Needs scikit-image, which serving does not: ``pip install 'worldstage[test]'``.
    """
    try:
        from skimage.metrics import structural_similarity
    except ImportError as missing:
        raise ImportError(
            "SSIM needs scikit-image: install the `test` extra, pip install 'worldstage[test]'"
        ) from missing

    x, y = _pair(native, cached)
    if min(x.shape[1:3]) < _WINDOW:
        raise QualityError(f"frames: got {x.shape[2]}x{x.shape[1]} pixels, SSIM needs at least {_WINDOW} on each side")
    values = [
        structural_similarity(
            a, b, channel_axis=-1, data_range=1, gaussian_weights=True, sigma=1.5, use_sample_covariance=False
        )
        for a, b in zip(x, y, strict=True)
    ]
    return float(np.mean(values))


def temporal_error(native: ArrayLike, cached: ArrayLike) -> float:
    """mean|dy - dx| / (mean|dx| + 1e-8), d the differences of consecutive frames: change that the native video lacks,
    relative to its own motion.  A constant offset scores 0; a nearly still native video makes it large."""
    x, y = _pair(native, cached)
    if len(x) < 2:
        raise QualityError("frames: got 1, temporal error needs at least 2")
    dx, dy = np.diff(x, axis=0), np.diff(y, axis=0)
    return float(np.abs(dy - dx).mean() / (np.abs(dx).mean() + 1e-8))


def psnr(native: ArrayLike, cached: ArrayLike) -> float:
    """10 log10(1 / mean squared error) over all frames, in dB; infinite for equal videos."""
    x, y = _pair(native, cached)
    error = float(((x - y) ** 2).mean())
    return math.inf if error == 0 else -10.0 * math.log10(error)


def _pair(native: ArrayLike, cached: ArrayLike) -> tuple[Video, Video]:
    x, y = _video("native", native), _video("cached", cached)
    if x.shape != y.shape:
        raise QualityError(f"cached: shape {y.shape} differs from native {x.shape}; compare equal requests only")
    return x, y


def _video(name: str, frames: ArrayLike) -> Video:
    array = np.asarray(frames)
    if array.ndim != 4 or array.shape[-1] != 3 or not len(array):
        raise QualityError(f"{name}: got shape {array.shape}, expected [frames, height, width, 3]")
    if array.dtype.kind != "f":
        raise QualityError(f"{name}: got {array.dtype}, expected float RGB in [0, 1]; divide 8-bit frames by 255")
    video: Video = array.astype(np.float64)
    low, high = float(video.min()), float(video.max())
    if not 0.0 <= low <= high <= 1.0:
        raise QualityError(f"{name}: values reach from {low} to {high}, expected finite values in [0, 1]")
    return video
