"""What calibration records of a native request: inner products of the residuals of one stage, never a residual itself.

    transition  step i against i-1           2 (N - 1) a request with guidance: pairs never cross requests or branches
    anchored    step i against (i-1, i-2)    two full steps before it
                step i against (i-1, i-3)    the step between them was a hit
                step i against (i-2, i-3)    a full step right after a hit: what the guard compares

Neighbouring residuals are nearly parallel, so products of the residuals themselves would lose all digits that matter.
With u = r_a - r_b and v = r_i - r_a taken in fp32 on the device and summed in fp64:

    r_i - (w_1 r_a + w_2 r_b) = v - s r_a + w_2 u        s = w_1 + w_2 - 1
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from deployments.plan import Branch
from deployments.stage_cache.closed import Closed, checked_branch

_LAGS = ((1, 2), (1, 3), (2, 3))
"""i - a and i - b of the anchored rows."""


class Transition(Closed):
    """Change of one stage's residual over one step of one branch."""

    stage: int
    branch: Branch
    step: int
    change: float
    """mean|r_i - r_(i-1)| / mean|r_(i-1)|: the target of the TeaCache polynomial."""
    ratio: float
    """Mean over tokens of |r_i| / |r_(i-1)| (diffusers' MagCache calibration)."""


class Anchored(Closed):
    """Inner products of one prediction: <ra,ra>, <ra,u>, <u,u>, <v,ra>, <v,u>, <v,v>, <ri,ri>."""

    stage: int
    branch: Branch
    step: int
    anchors: tuple[int, int]
    aa: float
    au: float
    uu: float
    va: float
    vu: float
    vv: float
    ii: float

    def error(self, weights: tuple[float, float]) -> float:
        """|r_i - r^_i| / |r_i| of this video with these (w_1, w_2)."""
        s, w2 = weights[0] + weights[1] - 1.0, weights[1]
        missed = (
            self.vv + s * s * self.aa + w2 * w2 * self.uu - 2 * s * self.va + 2 * w2 * self.vu - 2 * s * w2 * self.au
        )
        return float((max(missed, 0.0) / self.ii) ** 0.5)  # rounding may leave -1e-17 of an exact prediction


class _Pending(NamedTuple):
    branch: Branch
    step: int
    anchors: tuple[int, int] | None
    values: Tensor
    """[2] or [7] fp64 on the device."""


class ResidualCollector:
    """The statistics of one native request on one stage; a new object for every request.

    Device values are read once, in `finish`; memory: three residuals a branch.
    """

    def __init__(self, stage: int) -> None:
        self._stage = stage
        self._recent: dict[Branch, dict[int, Tensor]] = {}
        self._pending: list[_Pending] = []

    def add(self, branch: Branch, step: int, added: Tensor) -> None:
        """Record the residual of a full step.  added: [1, T, D], any floating dtype; steps are consecutive."""
        branch = checked_branch(branch)
        recent = self._recent.setdefault(branch, {})
        if recent and step != next(reversed(recent)) + 1:
            raise ValueError(f"step: got {step} after {next(reversed(recent))}; calibration needs every step full")
        current = added.float()
        if recent:
            self._pending.append(_Pending(branch, step, None, _change(current, recent[step - 1].float())))
        for to_a, to_b in _LAGS:
            a, b = step - to_a, step - to_b
            if b in recent:
                products = _products(current, recent[a].float(), recent[b].float())
                self._pending.append(_Pending(branch, step, (a, b), products))
        recent[step] = added
        if len(recent) > 3:
            del recent[next(iter(recent))]

    def finish(self) -> tuple[list[Transition], list[Anchored]]:
        """All rows of the request; waits for the device."""
        transitions: list[Transition] = []
        anchored: list[Anchored] = []
        for branch, step, anchors, values in self._pending:
            numbers = values.tolist()
            if anchors is None:
                change, ratio = numbers
                transitions.append(Transition(stage=self._stage, branch=branch, step=step, change=change, ratio=ratio))
            else:
                names = ("aa", "au", "uu", "va", "vu", "vv", "ii")
                products = dict(zip(names, numbers, strict=True))
                anchored.append(Anchored(stage=self._stage, branch=branch, step=step, anchors=anchors, **products))
        self._pending.clear()
        self._recent.clear()
        return transitions, anchored


def _change(current: Tensor, before: Tensor) -> Tensor:
    change = (current - before).abs().mean(dtype=torch.float64) / before.abs().mean(dtype=torch.float64)
    ratio = (current.norm(dim=-1) / before.norm(dim=-1)).mean(dtype=torch.float64)
    return torch.stack([change, ratio])


def _products(ri: Tensor, ra: Tensor, rb: Tensor) -> Tensor:
    u, v = ra - rb, ri - ra
    return _dots([(ra, ra), (ra, u), (u, u), (v, ra), (v, u), (v, v), (ri, ri)])


def _dots(pairs: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    return torch.stack([(x * y).sum(dtype=torch.float64) for x, y in pairs])
