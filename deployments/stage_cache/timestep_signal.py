"""The timestep signal that the TeaCache rule watches, computed on the host in fp32 from the model's own weights.

The device tensors are of no use here: diffusers casts the embedder's output to the model's dtype, and in bf16 the
change between neighbouring steps is close to the rounding.  Axes: N steps, F frequencies, D hidden width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from deployments.stage_cache.closed import digest_of
from deployments.stage_cache.coefficients import Signal

_PREFIX = "condition_embedder."
_LAYERS = ("time_embedder.linear_1", "time_embedder.linear_2", "time_proj")


@dataclass(frozen=True)
class Linear:
    """An affine layer in fp32 on the host.  weight: [out, in]; bias: [out]."""

    weight: Tensor
    bias: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight, self.bias)


@dataclass(frozen=True)
class TimeEmbedder:
    """The time embedding of a Wan transformer.  fc1: F -> D; fc2: D -> D; projection: D -> 6 D."""

    fc1: Linear
    fc2: Linear
    projection: Linear

    @classmethod
    def from_weights(cls, weights: Mapping[str, Tensor]) -> TimeEmbedder:
        """From a transformer's state dict with diffusers names (``condition_embedder.time_embedder.linear_1.weight``);
        other entries are ignored, a missing one is a KeyError that names it."""
        layers = []
        for name in _LAYERS:
            parts = [f"{_PREFIX}{name}.{part}" for part in ("weight", "bias")]
            missing = [part for part in parts if part not in weights]
            if missing:
                raise KeyError(f"weights: {missing} not found; the TeaCache signal needs them (diffusers Wan names)")
            weight, bias = (weights[part].detach().to("cpu", torch.float32) for part in parts)
            layers.append(Linear(weight, bias))
        return cls(*layers)

    def signal(self, kind: Signal, timesteps: Sequence[float]) -> Tensor:
        """m_i for every step.  timesteps: the solver's, in its units (999 .. 0); returns [N, D] or [N, 6 D] fp32."""
        e = self.fc2(functional.silu(self.fc1(sinusoid(timesteps, self.fc1.weight.shape[1]))))
        return e if kind == "e" else self.projection(functional.silu(e))


def sinusoid(timesteps: Sequence[float], frequencies: int) -> Tensor:
    """[N, F] fp32: cosines, then sines.  fp64 inside as in Wan-Video/Wan2.1 wan/modules/model.py
    `sinusoidal_embedding_1d`: at t = 999 the phase in fp32 is wrong in the fourth digit."""
    half = frequencies // 2
    rates = torch.pow(10000.0, -torch.arange(half, dtype=torch.float64) / half)
    phase = torch.outer(torch.tensor(list(timesteps), dtype=torch.float64), rates)
    return torch.cat([phase.cos(), phase.sin()], dim=1).float()


def relative_changes(signal: Tensor) -> tuple[float, ...]:
    """d_1 .. d_(N-1): mean|m_i - m_(i-1)| / mean|m_(i-1)|, in fp32 as the official code.  signal: [N, ...]."""
    if signal.shape[0] < 2:
        return ()
    flat = signal.flatten(1)
    change = (flat[1:] - flat[:-1]).abs().mean(1) / flat[:-1].abs().mean(1)
    return tuple(change.tolist())


def timesteps_sha256(timesteps: Sequence[float]) -> str:
    """Digest of a solver's timesteps: what a profile pins, since its schedule and weights are indexed by step."""
    return digest_of([float(timestep) for timestep in timesteps])
