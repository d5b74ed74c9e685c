"""The two formulas around the model, in the precision of the upstream code; the numbers are in `sampler_tables`."""

from __future__ import annotations

import torch
from torch import Tensor


def x0_from_flow(x: Tensor, flow: Tensor, sigma: float) -> Tensor:
    """The clean latents that a flow points at: ``x - sigma * flow`` in fp64, rounded to fp32."""
    return (x.double() - float(_fp32(sigma)) * flow.double()).float()


def renoise(x0: Tensor, noise: Tensor, sigma: float) -> Tensor:
    """``(1 - sigma) * x0 + sigma * noise`` in fp32; x0 and noise: fp32, the same shape."""
    s = _fp32(sigma)
    return (1 - s).item() * x0 + s.item() * noise


def _fp32(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float32)
