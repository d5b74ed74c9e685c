"""From calibration statistics to the numbers of a profile: polynomials, least-squares weights, ratios, error limits.

All of it is small linear algebra in fp64 on the host.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from pydantic import Field

from deployments.plan import BRANCHES, Branch
from deployments.stage_cache.closed import Closed
from deployments.stage_cache.coefficients import Coefficients, Signal
from deployments.stage_cache.predictor import AnchorWeights, Predictor, Scaled, linear_rho
from deployments.stage_cache.residual_stats import Anchored, Transition
from deployments.stage_cache.skip_schedule import Schedule


class FitError(ValueError):
    """The statistics do not determine what was asked for."""


class SignalFit(Closed):
    """One stage's polynomial from signal change d to residual change, and where it is calibrated."""

    signal: Signal
    coefficients: Coefficients = Field(description="Degree 4, highest power first.")
    input_range: tuple[float, float] = Field(description="Smallest and largest d of the calibration.")
    pairs: int = Field(ge=1, description="(d, residual change) pairs fitted.")
    rmse: float = Field(ge=0)
    r2: float = Field(le=1)


class WeightFit(Closed):
    """One least-squares row and what it leaves unexplained."""

    row: AnchorWeights
    videos: int
    error: float = Field(ge=0, description="sqrt(sum|r - r^|^2 / sum|r|^2), each video scaled to |r| = 1.")


def fit_signal(signal: Signal, changes: Sequence[float], transitions: Sequence[Transition]) -> SignalFit:
    """Least-squares polynomial of one stage over both branches and all videos.

    changes: d_1 .. d_(N-1) of the timesteps.  transitions: rows of one stage, steps 1 .. N-1.
    """
    stages = {row.stage for row in transitions}
    if len(stages) != 1:
        raise FitError(f"transitions: got rows of stages {sorted(stages)}, expected those of exactly one stage")
    outside = sorted({row.step for row in transitions if not 1 <= row.step <= len(changes)})
    if outside:
        raise FitError(f"transitions: steps {outside} have no d; the timesteps have steps 1 to {len(changes)}")
    x = np.array([changes[row.step - 1] for row in transitions])
    y = np.array([row.change for row in transitions])
    if len(np.unique(x)) < 5:
        raise FitError(f"transitions: {len(np.unique(x))} different d, a degree-4 polynomial needs at least 5")
    # Fitted on d scaled to [-1, 1] and expanded afterwards: powers of d itself span ten decades.
    lowest_first = np.polynomial.Polynomial.fit(x, y, 4).convert().coef
    lowest_first = np.pad(lowest_first, (0, 5 - len(lowest_first)))
    a, b, c, d, e = (float(value) for value in lowest_first[::-1])
    missed = y - np.polyval([a, b, c, d, e], x)
    spread = float(((y - y.mean()) ** 2).sum())
    r2 = 1.0 - float((missed**2).sum()) / spread if spread > 0 else 0.0
    rmse = math.sqrt(float((missed**2).mean()))
    return SignalFit(
        signal=signal, coefficients=(a, b, c, d, e), input_range=(min(x), max(x)), pairs=len(x), rmse=rmse, r2=r2
    )


def least_squares(rows: Iterable[Anchored], sigmas: Sequence[float] | None, ridge: float = 1e-4) -> list[WeightFit]:
    """Weights of every (branch, step, a, b) in ``rows``; rows of one stage, one for each video and key.

    Each video counts by its relative error, so loud videos do not rule the fit.  ridge: share of <ra,ra> and <u,u> that
    pulls the solution towards linear in ``sigmas``, or towards hold when they are None; it decides only directions
    that the videos leave open.
    """
    groups: dict[tuple[Branch, int, tuple[int, int]], list[Anchored]] = defaultdict(list)
    stages = set()
    for row in rows:
        stages.add(row.stage)
        groups[row.branch, row.step, row.anchors].append(row)
    if len(stages) > 1:
        raise FitError(f"rows: got stages {sorted(stages)}, expected those of exactly one stage")
    return [_solve(key, group, sigmas, ridge) for key, group in sorted(groups.items())]


def magnitude_ratios(transitions: Iterable[Transition], steps: int) -> Scaled:
    """Mean ratio by branch and step of one stage, the table of the `scaled` predictor."""
    sums: dict[tuple[Branch, int], list[float]] = defaultdict(list)
    for row in transitions:
        sums[row.branch, row.step].append(row.ratio)
    missing = [(branch, step) for branch in BRANCHES for step in range(1, steps) if (branch, step) not in sums]
    if missing:
        raise FitError(f"transitions: no row for {missing[:4]}; both branches need steps 1 to {steps - 1}")
    means = {key: math.fsum(ratios) / len(ratios) for key, ratios in sums.items()}
    tables = {branch: (1.0, *(means[branch, step] for step in range(1, steps))) for branch in BRANCHES}
    return Scaled(positive=tables["positive"], negative=tables["negative"])


def error_limits(
    rows: Iterable[Anchored], predictor: Predictor, schedule: Schedule, sigmas: Sequence[float], quantile: float
) -> Mapping[tuple[Branch, int], float]:
    """The ``quantile`` over videos of |r - r^| / |r| at the full steps where ``predictor`` could have predicted.

    Only rows whose anchors are the ones the schedule leaves before the step count.  Returns {} for one-anchor
    predictors: their rows would be a hold, whose error says little about the hits of a longer gap.
    """
    if predictor.anchors != 2:
        return {}
    errors: dict[tuple[Branch, int], list[float]] = defaultdict(list)
    for row in rows:
        if not schedule.reuses(row.step) and schedule.anchors(row.step, 2) == row.anchors:
            w1, w2 = predictor.weights(row.branch, row.step, row.anchors, sigmas)
            errors[row.branch, row.step].append(row.error((w1, w2)))
    return {key: float(np.quantile(values, quantile)) for key, values in sorted(errors.items())}


def _solve(
    key: tuple[Branch, int, tuple[int, int]], rows: Sequence[Anchored], sigmas: Sequence[float] | None, ridge: float
) -> WeightFit:
    branch, step, anchors = key
    if any(not row.ii > 0 for row in rows):
        raise FitError(f"rows: branch {branch}, step {step}: a video's residual is zero or not finite")
    aa, au, uu, va, vu = (
        math.fsum(getattr(row, name) / row.ii for row in rows) for name in ("aa", "au", "uu", "va", "vu")
    )
    w2_prior = 0.0 if sigmas is None else -linear_rho(step, anchors, sigmas)
    # v + w2_prior u = s ra - delta u, with delta = w2 - w2_prior: the ridge pulls s and delta to 0.
    normal = np.array([[aa * (1 + ridge), -au], [-au, uu * (1 + ridge)]])
    target = np.array([va + w2_prior * au, -(vu + w2_prior * uu)])
    s, delta = np.linalg.lstsq(normal, target, rcond=None)[0] if uu > 0 else (va / (aa * (1 + ridge)), 0.0)
    w2 = float(w2_prior + delta)
    w1 = float(1.0 + s - w2)
    error = math.sqrt(math.fsum(row.error((w1, w2)) ** 2 for row in rows) / len(rows))
    return WeightFit(
        row=AnchorWeights(branch=branch, step=step, anchors=anchors, weights=(w1, w2)), videos=len(rows), error=error
    )
