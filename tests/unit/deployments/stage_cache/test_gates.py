"""Bounds themselves pass; the score ranks failures."""

from __future__ import annotations

import math

import pytest

from deployments.stage_cache.gates import FREEZE_MARGINS, GateValues, bootstrap_upper


def values(ssim: float = 0.99, worst: float = 0.97, error: float = 0.05, ratio: float = 0.8) -> GateValues:
    return GateValues(
        videos=36, mean_ssim=ssim, min_video_ssim=worst, mean_temporal_error_ratio=error, latency_ratio=ratio
    )


def test_the_bounds_pass_and_the_next_float_fails() -> None:
    """Values are compared unrounded."""
    assert values(0.95, 0.90, 0.10, 0.90).failures() == {}
    assert values(0.95, 0.90, 0.10, 0.90).score == 1.0
    beyond = values(
        math.nextafter(0.95, 0), math.nextafter(0.90, 0), math.nextafter(0.10, 1), math.nextafter(0.90, 1)
    ).failures()
    assert list(beyond) == ["mean_ssim", "min_video_ssim", "mean_temporal_error_ratio", "latency_ratio"]
    assert beyond["latency_ratio"] == "0.9000000000000001, required <= 0.9"
    assert beyond["mean_ssim"].endswith("required >= 0.95")


@pytest.mark.parametrize(
    ("measured", "failed"),
    [
        # a public attempt: TeaCache in every stage of Wan2.1-T2V-1.3B, vLLM-Omni
        (values(0.988863, 0.971094, 0.163825, 1.027440), {"mean_temporal_error_ratio", "latency_ratio"}),
        (values(0.974147, 0.938729, 0.250010, 1.101729), {"mean_temporal_error_ratio", "latency_ratio"}),
        (values(), set()),
    ],
)
def test_known_rows(measured: GateValues, failed: set[str]) -> None:
    assert set(measured.failures()) == failed


def test_the_score_is_the_worst_gate() -> None:
    assert values(error=0.2).score == pytest.approx(2.0)
    assert values(ssim=0.475, error=0.15).score == pytest.approx(2.0)
    assert values(ratio=1.8).score == pytest.approx(2.0)
    assert values(worst=-0.1).score == math.inf


def test_margins_are_stricter_than_the_gates() -> None:
    assert set(values(0.952, 0.905, 0.09, 0.88).failures(FREEZE_MARGINS)) == {
        "mean_ssim",
        "min_video_ssim",
        "mean_temporal_error_ratio",
        "latency_ratio",
    }


def test_bootstrap_upper_end() -> None:
    assert bootstrap_upper([0.05] * 10) == 0.05
    data = [0.02, 0.08] * 24  # mean .05, standard error .03 / sqrt(48) = .00433
    # 97.5 % of a near-normal mean: 1.96 standard errors; .0005: 10,000 resamples of a grid of 48 values
    assert bootstrap_upper(data) == pytest.approx(0.05 + 1.96 * 0.00433, abs=5e-4)
    assert bootstrap_upper(data) == bootstrap_upper(data)
