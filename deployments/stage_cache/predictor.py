"""The residual a hit uses instead of running blocks:  h_out = h_in + w_1 r_a + w_2 r_b.

r_a, r_b are the stage's residuals (output minus input) at the last two full steps a > b of this request and branch.
A predictor is a pure function from (branch, step, anchors, sigmas) to host floats: a hit reads nothing from the device.

    hold      (1)                      plain TeaCache                                 error ~ |r'|  dsigma
    scaled    (gamma)                  gamma = product of magnitude ratios (MagCache)
    linear    (1 + rho, -rho)          rho = (s_i - s_a) / (s_a - s_b), s = sigma     error ~ |r''| dsigma^2
    ls2       (w_1, w_2) from a table  least squares over calibration videos, keyed (branch, step, a, b)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from deployments.plan import Branch
from deployments.stage_cache.closed import Closed


class PredictionError(ValueError):
    """A prediction was asked for that the predictor cannot make."""


class Hold(Closed):
    """The last residual as it is."""

    kind: Literal["hold"] = "hold"
    anchors: ClassVar[int] = 1

    def covers(self, branch: Branch, step: int, anchors: Sequence[int]) -> bool:
        """Whether `weights` has what it needs for these steps."""
        return len(anchors) == self.anchors

    def weights(self, branch: Branch, step: int, anchors: Sequence[int], sigmas: Sequence[float]) -> tuple[float, ...]:
        _check(anchors, step, self.anchors)
        return (1.0,)


class Scaled(Closed):
    """The last residual times the magnitude ratios since it was taken."""

    kind: Literal["scaled"] = "scaled"
    anchors: ClassVar[int] = 1
    positive: tuple[float, ...] = Field(description="|r_i| / |r_(i-1)| for each step i; entry 0 is not read.")
    negative: tuple[float, ...] = Field(description="The same for the negative branch.")

    def covers(self, branch: Branch, step: int, anchors: Sequence[int]) -> bool:
        """Whether `weights` has what it needs for these steps."""
        return len(anchors) == self.anchors and step < min(len(self.positive), len(self.negative))

    def weights(self, branch: Branch, step: int, anchors: Sequence[int], sigmas: Sequence[float]) -> tuple[float, ...]:
        _check(anchors, step, self.anchors)
        ratios = self.positive if branch == "positive" else self.negative
        if step >= len(ratios):
            raise PredictionError(f"scaled: step {step} has no ratio; the table ends at step {len(ratios) - 1}")
        return (math.prod(ratios[anchors[0] + 1 : step + 1]),)


class Linear(Closed):
    """The line through the last two residuals, in the solver's sigma."""

    kind: Literal["linear"] = "linear"
    anchors: ClassVar[int] = 2

    def covers(self, branch: Branch, step: int, anchors: Sequence[int]) -> bool:
        """Whether `weights` has what it needs for these steps."""
        return len(anchors) == self.anchors

    def weights(self, branch: Branch, step: int, anchors: Sequence[int], sigmas: Sequence[float]) -> tuple[float, ...]:
        _check(anchors, step, self.anchors)
        rho = linear_rho(step, anchors, sigmas)
        return (1.0 + rho, -rho)


class AnchorWeights(Closed):
    """One row of a least-squares table."""

    branch: Branch
    step: int = Field(ge=2)
    anchors: tuple[int, int] = Field(description="The full steps a > b it was fitted for.")
    weights: tuple[float, float] = Field(description="Of r_a and r_b.")

    @model_validator(mode="after")
    def _anchors_come_before(self) -> AnchorWeights:
        a, b = self.anchors
        if not 0 <= b < a < self.step:
            raise ValueError(f"anchors: got {[a, b]} for step {self.step}, expected {self.step} > a > b >= 0")
        return self


class LeastSquares(Closed):
    """Weights fitted on native trajectories, see `fit.least_squares`."""

    kind: Literal["ls2"] = "ls2"
    anchors: ClassVar[int] = 2
    table: tuple[AnchorWeights, ...]

    @model_validator(mode="after")
    def _rows_are_unique(self) -> LeastSquares:
        if len(self._rows) != len(self.table):
            raise ValueError("table: a (branch, step, anchors) occurs twice; keep one row of each")
        return self

    @cached_property
    def _rows(self) -> dict[tuple[Branch, int, tuple[int, ...]], tuple[float, float]]:
        return {(row.branch, row.step, row.anchors): row.weights for row in self.table}

    def covers(self, branch: Branch, step: int, anchors: Sequence[int]) -> bool:
        """Whether `weights` has what it needs for these steps."""
        return (branch, step, tuple(anchors)) in self._rows

    def weights(self, branch: Branch, step: int, anchors: Sequence[int], sigmas: Sequence[float]) -> tuple[float, ...]:
        _check(anchors, step, self.anchors)
        row = self._rows.get((branch, step, tuple(anchors)))
        if row is None:
            raise PredictionError(
                f"ls2: no weights for branch {branch}, step {step}, anchors {list(anchors)}; "
                "fit them, or choose a schedule that the table covers"
            )
        return row


Predictor = Annotated[Hold | Scaled | Linear | LeastSquares, Field(discriminator="kind")]


def linear_rho(step: int, anchors: Sequence[int], sigmas: Sequence[float]) -> float:
    """(s_i - s_a) / (s_a - s_b).  sigmas: the solver's, one a step at least, 1 .. 0."""
    a, b = anchors
    run = sigmas[a] - sigmas[b]
    if run == 0.0:
        raise PredictionError(f"sigmas: steps {a} and {b} have the same sigma {sigmas[a]}; no line goes through them")
    return (sigmas[step] - sigmas[a]) / run


def residual(hidden_in: Tensor, hidden_out: Tensor) -> Tensor:
    """What a full step added, in the stage's dtype (bf16 subtraction rounds once from fp32).  Shapes equal."""
    return hidden_out - hidden_in


def apply(hidden: Tensor, residuals: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """``hidden + sum(w_k * r_k)``: fp32 inside, rounded once to ``hidden``'s dtype.  No host-device sync.

    hidden and every residual: same shape ([1, tokens, D] in a stage), any floating dtype.  ``hidden`` is not changed.
    """
    _check_operands(hidden, residuals, weights)
    # Mixed-dtype add reads a bf16 residual and accumulates fp32 in one kernel; the weights travel as kernel arguments.
    total = torch.add(hidden.float(), residuals[0], alpha=weights[0])
    for added, weight in zip(residuals[1:], weights[1:], strict=True):
        total.add_(added, alpha=weight)
    return total.to(hidden.dtype)


def prediction_error(actual: Tensor, residuals: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """|r - r^| / |r| as an fp32 scalar on the device of ``actual``; NaN when ``actual`` is zero.  No sync."""
    _check_operands(actual, residuals, weights)
    reference = actual.float()
    missed = torch.add(reference, residuals[0], alpha=-weights[0])
    for added, weight in zip(residuals[1:], weights[1:], strict=True):
        missed.add_(added, alpha=-weight)
    return missed.norm() / reference.norm()


def _check(anchors: Sequence[int], step: int, needed: int) -> None:
    if len(anchors) != needed or not all(old < new for new, old in zip([step, *anchors], anchors, strict=False)):
        raise PredictionError(
            f"anchors: got {list(anchors)} for step {step}, expected {needed} full steps before it, newest first"
        )


def _check_operands(hidden: Tensor, residuals: Sequence[Tensor], weights: Sequence[float]) -> None:
    if not residuals or len(residuals) != len(weights):
        raise PredictionError(f"residuals: got {len(residuals)} for {len(weights)} weights, expected one each")
    for kept in residuals:
        if kept.shape != hidden.shape:
            raise PredictionError(f"residual: shape {list(kept.shape)} does not match hidden {list(hidden.shape)}")
