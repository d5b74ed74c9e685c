"""Check 20: the gates' metrics against hand-made numbers and direct formulas."""

from __future__ import annotations

import math
import sys

import numpy as np
import pytest
import torch

from app.quality import QualityError, Video, psnr, ssim, temporal_error

RNG = np.random.default_rng(0)


def moving(frames: int = 4, size: int = 24) -> Video:
    """Smooth noise in [.2, .7] that drifts."""
    base = RNG.random((frames, size, size, 3))
    return 0.2 + 0.5 * base


def test_a_video_equals_itself() -> None:
    x = moving()
    assert temporal_error(x, x) == 0.0
    assert ssim(x, x) == 1.0
    assert psnr(x, x) == math.inf


def test_temporal_error_by_hand() -> None:
    x = moving()
    # 1e-9: rounding of the sums, and the 1e-8 in the denominator against mean|dx| of about .17
    assert temporal_error(x, x + 0.1) == pytest.approx(0.0, abs=1e-9)  # a constant offset moves nothing
    assert temporal_error(x, 1.1 * x) == pytest.approx(0.1, rel=1e-6)
    flicker = 0.05 * np.array([1, -1, 1, -1])[:, None, None, None]  # adds +-.1 to every difference
    still_motion = np.abs(np.diff(x, axis=0)).mean()
    assert temporal_error(x, x + flicker) == pytest.approx(0.1 / still_motion, rel=1e-6)


def test_flicker_on_a_still_video_is_huge() -> None:
    x = np.full((3, 16, 16, 3), 0.5)
    y = x.copy()
    y[1] += 0.01
    assert temporal_error(x, y) == pytest.approx(0.01 / 1e-8)


def test_temporal_error_is_not_a_ratio_of_motion() -> None:
    """Reversed motion has equal magnitude and error 2."""
    ramp = np.broadcast_to(np.array([0.2, 0.3, 0.4])[:, None, None, None], (3, 12, 12, 3))
    assert temporal_error(ramp, ramp[::-1]) == pytest.approx(2.0, rel=1e-6)


def test_ssim_of_constant_frames() -> None:
    """Only the luminance term is left: (2ab + C1) / (a^2 + b^2 + C1), C1 = .01^2."""
    a, b = 0.5, 0.6
    x, y = np.full((2, 16, 16, 3), a), np.full((2, 16, 16, 3), b)
    assert ssim(x, y) == pytest.approx((2 * a * b + 1e-4) / (a * a + b * b + 1e-4), rel=1e-9)


def test_ssim_is_the_mean_over_frames() -> None:
    x = moving(3)
    y = x.copy()
    y[2] = np.clip(y[2] + 0.1 * RNG.standard_normal(y[2].shape), 0, 1)
    alone = ssim(x[2:], y[2:])
    assert alone < 0.99
    assert ssim(x, y) == pytest.approx((2 + alone) / 3)


def test_ssim_equals_the_formula() -> None:
    """Oracle: Wang et al. 2004 with an 11-tap Gaussian window of sigma 1.5 and biased variances, written out."""
    from scipy.ndimage import gaussian_filter

    def blur(image: Video) -> Video:
        blurred: Video = gaussian_filter(image, 1.5, truncate=3.5, mode="reflect")
        return blurred

    x, y = moving(1), moving(1)
    values = []
    for c in range(3):
        a, b = x[0, :, :, c], y[0, :, :, c]
        ma, mb = blur(a), blur(b)
        va, vb, cov = blur(a * a) - ma * ma, blur(b * b) - mb * mb, blur(a * b) - ma * mb
        c1, c2 = 0.01**2, 0.03**2
        index = (2 * ma * mb + c1) * (2 * cov + c2) / ((ma * ma + mb * mb + c1) * (va + vb + c2))
        values.append(index[5:-5, 5:-5].mean())  # scikit-image leaves the window's radius of border out
    assert ssim(x, y) == pytest.approx(np.mean(values), rel=1e-9)


def test_psnr_by_hand() -> None:
    x = np.full((1, 12, 12, 3), 0.5)
    assert psnr(x, x + 0.1) == pytest.approx(20.0)  # 10 log10(1 / .01)


def test_tensors_and_fp32_are_welcome() -> None:
    x = moving().astype(np.float32)
    y = (x * np.float32(0.9)).astype(np.float32)
    for metric in (ssim, temporal_error, psnr):
        assert metric(torch.from_numpy(x), torch.from_numpy(y)) == metric(x, y)


@pytest.mark.parametrize(
    ("native", "cached", "words"),
    [
        (np.zeros((2, 12, 12, 3)), np.zeros((3, 12, 12, 3)), "differs from native"),
        (np.zeros((12, 12, 3)), np.zeros((12, 12, 3)), "expected \\[frames, height, width, 3\\]"),
        (np.zeros((2, 3, 12, 12)), np.zeros((2, 3, 12, 12)), "expected \\[frames"),
        (np.zeros((2, 12, 12, 3), np.uint8), np.zeros((2, 12, 12, 3), np.uint8), "divide 8-bit frames by 255"),
        (np.full((2, 12, 12, 3), 2.0), np.zeros((2, 12, 12, 3)), "native: values reach from 2.0"),
        (np.zeros((2, 12, 12, 3)), np.full((2, 12, 12, 3), np.nan), "cached: values reach from nan"),
    ],
)
def test_what_is_no_pair_of_videos_is_refused(native: Video, cached: Video, words: str) -> None:
    for metric in (ssim, temporal_error, psnr):
        with pytest.raises(QualityError, match=words):
            metric(native, cached)


def test_too_small_and_too_short_videos_are_refused() -> None:
    with pytest.raises(QualityError, match="at least 11"):
        ssim(np.zeros((2, 10, 12, 3)), np.zeros((2, 10, 12, 3)))
    with pytest.raises(QualityError, match="at least 2"):
        temporal_error(np.zeros((1, 12, 12, 3)), np.zeros((1, 12, 12, 3)))


def test_without_scikit_image_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "skimage.metrics", None)
    with pytest.raises(ImportError, match=r"worldstage\[test\]"):
        ssim(moving(), moving())
    assert temporal_error(moving(), moving()) > 0  # needs no extra
