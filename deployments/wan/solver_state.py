"""A request between two steps, as a rank saves it.  `saved_state` reads it back without torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from safetensors.torch import load, save
from torch import Tensor

from deployments.wan.saved_state import SavedState, restarted_numbers
from deployments.wan.solver_spec import SolverSpec


@dataclass(frozen=True)
class SolverState:
    """A request between two steps, enough to go on bit for bit."""

    step: int
    """The next step to compute; `len(timesteps)` when all are done."""
    latents: Tensor
    """[1, C, F, H, W] fp32, entering that step."""
    tensors: Mapping[str, Tensor]
    numbers: Mapping[str, Any]
    """As `Solver.state` gives them."""

    def to_bytes(self) -> bytes:
        """A safetensors file."""
        return save(
            {"latents": self.latents, **{f"solver.{name}": x for name, x in self.tensors.items()}},
            {"step": str(self.step), "numbers": json.dumps(dict(self.numbers))},
        )

    @classmethod
    def from_bytes(cls, data: bytes) -> SolverState:
        """Inverse of `to_bytes`; a torn or foreign file raises ValueError, KeyError or SafetensorError."""
        saved, tensors = SavedState.from_bytes(data), load(data)
        return cls(
            step=saved.step,
            latents=tensors.pop("latents"),
            tensors={name.removeprefix("solver."): x for name, x in tensors.items()},
            numbers=saved.numbers,
        )


def restarted_state(step: int, latents: Tensor, solver: SolverSpec) -> SolverState:
    """latents: another run's, [1, C, F, H, W] fp32, entering `step`; without history the order starts again at 1."""
    return SolverState(step, latents, {}, restarted_numbers(solver.order))
