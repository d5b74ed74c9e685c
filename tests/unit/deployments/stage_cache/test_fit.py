"""Fits against fp64 oracles and problems with a known answer."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from deployments.plan import BRANCHES
from deployments.stage_cache.fit import FitError, error_limits, fit_signal, least_squares, magnitude_ratios
from deployments.stage_cache.predictor import Linear
from deployments.stage_cache.residual_stats import Anchored, ResidualCollector, Transition
from deployments.stage_cache.skip_schedule import Schedule, polynomial

SIGMAS = (1.0, 0.9, 0.75, 0.5, 0.2, 0.0)


def rows_of(residuals: list[torch.Tensor], stage: int = 0) -> list[Anchored]:
    collector = ResidualCollector(stage)
    for step, added in enumerate(residuals):
        collector.add("positive", step, added)
    return collector.finish()[1]


def video(seed: int, loudness: float = 1.0) -> list[torch.Tensor]:
    """Residuals on a plane: r_2 = 1.6 r_1 - .55 r_0 exactly."""
    g = torch.Generator().manual_seed(seed)
    r0 = loudness * torch.randn(1, 16, 8, generator=g)
    r1 = r0 + 0.1 * loudness * torch.randn(1, 16, 8, generator=g)
    return [r0, r1, 1.6 * r1 - 0.55 * r0]


def test_least_squares_finds_known_weights() -> None:
    (fit,) = least_squares([row for seed in range(3) for row in rows_of(video(seed))], None, ridge=0.0)
    # 1e-4: r2 is rounded to fp32 (1e-7) and the differences are a tenth of it
    assert fit.row.weights == pytest.approx((1.6, -0.55), abs=1e-4)
    assert (fit.row.step, fit.row.anchors, fit.videos) == (2, (1, 0), 3)
    assert fit.error < 1e-4


def test_least_squares_equals_a_dense_solve() -> None:
    """Oracle: numpy's lstsq on the stacked, relatively weighted tensors in fp64."""
    g = torch.Generator().manual_seed(0)
    videos = []
    for loudness in (1.0, 30.0):
        r0 = loudness * torch.randn(1, 16, 8, generator=g)
        videos.append([r0, r0 + loudness * 0.2 * torch.randn(1, 16, 8, generator=g)])
        videos[-1].append(videos[-1][1] + loudness * 0.3 * torch.randn(1, 16, 8, generator=g))
    (fit,) = least_squares([row for v in videos for row in rows_of(v)], None, ridge=0.0)
    scale = [v[2].double().norm() for v in videos]
    columns = [
        torch.cat([(v[k].double() / s).flatten() for v, s in zip(videos, scale, strict=True)]) for k in (1, 0, 2)
    ]
    dense = np.linalg.lstsq(torch.stack(columns[:2], 1).numpy(), columns[2].numpy(), rcond=None)[0]
    assert fit.row.weights == pytest.approx(tuple(dense), abs=1e-4)  # fp32 differences, as above
    missed = columns[2] - dense[0] * columns[0] - dense[1] * columns[1]
    assert fit.error == pytest.approx((missed.norm() / 2**0.5).item(), rel=1e-4)


def test_loud_videos_do_not_rule() -> None:
    """Relative weighting: scaling one video leaves the fit as it was."""
    g = torch.Generator().manual_seed(5)
    quiet = [torch.randn(1, 16, 8, generator=g) for _ in range(3)]
    other = [torch.randn(1, 16, 8, generator=g) for _ in range(3)]
    (once,) = least_squares(rows_of(quiet) + rows_of(other), None)
    (loud,) = least_squares(rows_of(quiet) + rows_of([100.0 * r for r in other]), None)
    assert loud.row.weights == pytest.approx(once.row.weights, rel=1e-5)


def test_the_ridge_leads_where_the_videos_are_silent() -> None:
    """r_a = r_b leaves w2 open: the prior decides, and the fit stays finite.  A strong ridge gives the prior itself."""
    r = torch.ones(1, 4, 4)
    (hold,) = least_squares(rows_of([r, r, r]), None)
    assert hold.row.weights == (1.0, 0.0)
    (linear,) = least_squares(rows_of([r, r, r]), SIGMAS)
    assert linear.row.weights == pytest.approx((2.5, -1.5))  # rho = (.75 - .9) / (.9 - 1)
    (strong,) = least_squares(rows_of(video(0)), SIGMAS, ridge=1e9)
    assert strong.row.weights == pytest.approx((2.5, -1.5), abs=1e-6)


def test_a_fit_beats_hold_and_linear_on_its_own_videos() -> None:
    rows = [row for seed in range(3) for row in rows_of(video(seed))]
    (fit,) = least_squares(rows, SIGMAS)
    w_linear = Linear().weights("positive", 2, (1, 0), SIGMAS)
    for row in rows:
        assert row.error(fit.row.weights) < min(row.error((1.0, 0.0)), row.error((w_linear[0], w_linear[1])))


def test_stages_are_fitted_apart() -> None:
    """Check 7: rows of two stages never meet; different stages give different weights."""
    with pytest.raises(FitError, match=r"stages \[0, 1\]"):
        least_squares(rows_of(video(0), 0) + rows_of(video(0), 1), None)
    g = torch.Generator().manual_seed(9)
    other = [torch.randn(1, 16, 8, generator=g) for _ in range(3)]
    (first,), (second,) = least_squares(rows_of(video(0), 0), None), least_squares(rows_of(other, 1), None)
    assert first.row.weights != pytest.approx(second.row.weights, abs=0.1)


def test_a_silent_residual_is_an_error() -> None:
    with pytest.raises(FitError, match="step 2"):
        least_squares(rows_of([torch.ones(1, 2, 2), torch.ones(1, 2, 2), torch.zeros(1, 2, 2)]), None)


def transitions(changes: list[float], target: tuple[float, ...], stage: int = 0) -> list[Transition]:
    return [
        Transition(stage=stage, branch=branch, step=i + 1, change=polynomial(target, d), ratio=1.0 - 0.01 * (i + 1))
        for branch in BRANCHES
        for i, d in enumerate(changes)
    ]


def test_the_polynomial_comes_back() -> None:
    """49 different d, as of 50 steps; published coefficients as the truth, and their huge range as the difficulty."""
    changes = [0.005 + 0.0035 * i for i in range(49)]
    target = (2.39676752e03, -1.31110545e03, 2.01331979e02, -8.29855975, 0.137887774)
    fit = fit_signal("e", changes, transitions(changes, target))
    assert fit.coefficients == pytest.approx(target, rel=1e-8)  # fp64 on data scaled to [-1, 1]
    assert fit.input_range == (changes[0], changes[-1])
    assert fit.pairs == 98
    assert fit.r2 == pytest.approx(1.0)
    assert fit.rmse < 1e-10


def test_the_fit_reports_its_scatter() -> None:
    changes = [0.01 * (i + 1) for i in range(10)]
    rows = transitions(changes, (0.0, 0.0, 0.0, 0.0, 0.5))
    up = [row.model_copy(update={"change": row.change + (0.1 if row.branch == "positive" else -0.1)}) for row in rows]
    fit = fit_signal("e0", changes, up)
    assert fit.rmse == pytest.approx(0.1)  # branches disagree by +-.1 about a constant
    assert fit.r2 == pytest.approx(0.0, abs=1e-9)


def test_wrong_transitions_are_refused() -> None:
    changes = [0.01 * (i + 1) for i in range(10)]
    flat = (0.0,) * 5
    with pytest.raises(FitError, match=r"stages \[0, 1\]"):
        fit_signal("e", changes, transitions(changes, flat, 0) + transitions(changes, flat, 1))
    with pytest.raises(FitError, match=r"steps \[10\] have no d"):
        fit_signal("e", changes[:9], transitions(changes, flat))
    with pytest.raises(FitError, match="needs at least 5"):
        fit_signal("e", changes[:4], transitions(changes[:4], flat))


def test_magnitude_ratios_by_step_and_branch() -> None:
    rows = transitions([0.1] * 3, (0.0,) * 5)
    louder = [row.model_copy(update={"ratio": row.ratio + 0.2}) for row in rows if row.branch == "negative"]
    table = magnitude_ratios(rows + louder, 4)
    assert table.positive == pytest.approx((1.0, 0.99, 0.98, 0.97))
    assert table.negative == pytest.approx((1.0, 1.09, 1.08, 1.07))
    with pytest.raises(FitError, match="no row for"):
        magnitude_ratios(rows, 5)


def test_error_limits_cover_the_full_steps_of_the_schedule() -> None:
    g = torch.Generator().manual_seed(4)
    videos = [rows_of([torch.randn(1, 4, 4, generator=g) for _ in range(5)]) for _ in range(3)]
    rows = [row for one in videos for row in one]
    limits = error_limits(rows, Linear(), Schedule(5, (3,)), SIGMAS, 0.5)
    # Step 2 after (1, 0); step 4 after the hit at 3: anchors (2, 1).  Step 3 is a hit and not checked.
    assert set(limits) == {("positive", 2), ("positive", 4)}
    w = Linear().weights("positive", 4, (2, 1), SIGMAS)
    errors = sorted(row.error((w[0], w[1])) for row in rows if row.step == 4 and row.anchors == (2, 1))
    assert limits["positive", 4] == pytest.approx(errors[1])  # the median of three
