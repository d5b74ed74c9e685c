"""Weights by hand, and the fused application against fp64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from deployments.stage_cache.predictor import (
    AnchorWeights,
    Hold,
    LeastSquares,
    Linear,
    PredictionError,
    Scaled,
    apply,
    prediction_error,
    residual,
)

SIGMAS = (1.0, 0.9, 0.7, 0.4, 0.0)
LS2 = LeastSquares(
    table=(
        AnchorWeights(branch="positive", step=3, anchors=(2, 1), weights=(1.5, -0.5)),
        AnchorWeights(branch="negative", step=3, anchors=(2, 1), weights=(1.25, -0.25)),
        AnchorWeights(branch="positive", step=3, anchors=(2, 0), weights=(1.125, -0.125)),
    )
)


def test_weights_by_hand() -> None:
    assert Hold().weights("positive", 3, (2,), SIGMAS) == (1.0,)
    ratios = Scaled(positive=(1.0, 9.0, 0.5, 0.25), negative=(1.0, 9.0, 0.5, 2.0))
    assert ratios.weights("positive", 3, (1,), SIGMAS) == (0.125,)  # steps 2 and 3 since the anchor at 1
    assert ratios.weights("negative", 3, (2,), SIGMAS) == (2.0,)
    # rho = (.4 - .7) / (.7 - .9) = 1.5; 1e-12: rounding of the sigmas
    assert Linear().weights("positive", 3, (2, 1), SIGMAS) == pytest.approx((2.5, -1.5), rel=1e-12)
    # over a hit between: rho = (.4 - .7) / (.7 - 1.0) = 1
    assert Linear().weights("positive", 3, (2, 0), SIGMAS) == pytest.approx((2.0, -1.0), rel=1e-12)


def test_least_squares_are_keyed_by_branch_step_and_anchors() -> None:
    assert LS2.weights("positive", 3, (2, 1), SIGMAS) == (1.5, -0.5)
    assert LS2.weights("negative", 3, (2, 1), SIGMAS) == (1.25, -0.25)
    assert LS2.weights("positive", 3, (2, 0), SIGMAS) == (1.125, -0.125)
    assert not LS2.covers("negative", 3, (2, 0))
    with pytest.raises(PredictionError, match=r"branch negative, step 3, anchors \[2, 0\]"):
        LS2.weights("negative", 3, (2, 0), SIGMAS)


@pytest.mark.parametrize("anchors", [(), (2,), (1, 2), (3, 1), (2, 2)])
def test_wrong_anchors_are_refused(anchors: tuple[int, ...]) -> None:
    with pytest.raises(PredictionError, match="expected 2 full steps"):
        Linear().weights("positive", 3, anchors, SIGMAS)


def test_equal_sigmas_have_no_line() -> None:
    with pytest.raises(PredictionError, match="same sigma"):
        Linear().weights("positive", 2, (1, 0), (1.0, 1.0, 0.5))


def test_a_scaled_table_that_is_too_short_is_refused() -> None:
    with pytest.raises(PredictionError, match="ends at step 1"):
        Scaled(positive=(1.0, 1.0), negative=(1.0, 1.0)).weights("positive", 2, (1,), SIGMAS)


@given(slope=st.floats(-4, 4), level=st.floats(-4, 4), b=st.integers(0, 1))
def test_linear_is_exact_on_a_line_in_sigma(slope: float, level: float, b: int) -> None:
    r = [slope * s + level for s in SIGMAS]
    w = Linear().weights("positive", 3, (2, b), SIGMAS)
    # 1e-11: a few roundings of numbers up to 8 * 2.5
    assert w[0] * r[2] + w[1] * r[b] == pytest.approx(r[3], abs=1e-11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_apply_rounds_once(dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(1)
    h, ra, rb = (torch.randn(1, 64, 8, generator=g).to(dtype) for _ in range(3))
    before = h.clone()
    got = apply(h, (ra, rb), (1.7, -0.7))
    exact = h.double() + 1.7 * ra.double() - 0.7 * rb.double()
    # Half a unit in the last place of the output dtype, and of fp32 for the two sums inside (values below 16).
    bound = exact.abs() * torch.finfo(dtype).eps * 0.51 + 4 * 16 * torch.finfo(torch.float32).eps
    assert got.dtype == dtype
    assert ((got.double() - exact).abs() <= bound).all()
    assert torch.equal(h, before)


def test_bf16_accumulation_would_fail_the_bound_above() -> None:
    """The test of the test: two bf16 additions round twice, and some value misses the one-rounding bound."""
    g = torch.Generator().manual_seed(1)
    h, ra, rb = (torch.randn(1, 64, 8, generator=g).bfloat16() for _ in range(3))
    twice = torch.add(torch.add(h, ra, alpha=1.7), rb, alpha=-0.7)
    exact = h.double() + 1.7 * ra.double() - 0.7 * rb.double()
    assert ((twice.double() - exact).abs() > exact.abs() * torch.finfo(torch.bfloat16).eps * 0.51 + 1e-5).any()


def test_hold_is_the_official_update() -> None:
    """Plain TeaCache: h + r in the model dtype."""
    g = torch.Generator().manual_seed(2)
    h, r = (torch.randn(1, 16, 8, generator=g).bfloat16() for _ in range(2))
    assert torch.equal(apply(h, (r,), (1.0,)), h + r)


def test_residual_and_hold_return_the_output_up_to_rounding() -> None:
    h, out = torch.full((1, 2, 2), 3.0), torch.full((1, 2, 2), 5.0)
    assert torch.equal(residual(h, out), torch.full((1, 2, 2), 2.0))
    assert torch.equal(apply(h, (residual(h, out),), (1.0,)), out)


def test_another_shape_is_refused() -> None:
    """Check 22: a residual of another resolution is never broadcast."""
    with pytest.raises(PredictionError, match=r"\[1, 4, 2\] does not match hidden \[1, 8, 2\]"):
        apply(torch.zeros(1, 8, 2), (torch.zeros(1, 4, 2),), (1.0,))
    with pytest.raises(PredictionError, match="does not match"):
        apply(torch.zeros(1, 8, 2), (torch.zeros(1, 1, 2),), (1.0,))


def test_prediction_error_by_hand() -> None:
    r, ra, rb = torch.tensor([3.0, 4.0]), torch.tensor([3.0, 0.0]), torch.tensor([0.0, 1.0])
    assert prediction_error(r, (ra, rb), (1.0, 4.0)).item() == 0.0
    assert prediction_error(r, (ra,), (1.0,)).item() == pytest.approx(0.8)  # |(0, 4)| / 5
    assert torch.isnan(prediction_error(torch.zeros(2), (torch.zeros(2),), (1.0,)))


def test_the_kind_chooses_the_fields() -> None:
    from deployments.stage_cache.predictor import Predictor

    adapter: TypeAdapter[object] = TypeAdapter(Predictor)
    assert adapter.validate_python({"kind": "hold"}) == Hold()
    with pytest.raises(ValidationError, match="Extra inputs"):
        adapter.validate_python({"kind": "hold", "table": []})
    with pytest.raises(ValidationError, match="taylor"):
        adapter.validate_python({"kind": "taylor"})
    with pytest.raises(ValidationError, match="occurs twice"):
        LeastSquares(table=(LS2.table[0], LS2.table[0]))
    with pytest.raises(ValidationError, match="expected 3 > a > b >= 0"):
        AnchorWeights(branch="positive", step=3, anchors=(3, 1), weights=(1.0, 0.0))
    with pytest.raises(ValidationError, match="finite"):
        AnchorWeights(branch="positive", step=3, anchors=(2, 1), weights=(float("nan"), 0.0))
