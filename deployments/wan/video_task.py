"""One video as a gang sees it: what rank 0 is given and passes on to every rank."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from safetensors.torch import load, save
from torch import Tensor

from deployments.plan import Plan
from deployments.wan.solver import SolverSpec


@dataclass(frozen=True)
class VideoTask:
    """Everything but the prompt embeddings."""

    job: str
    plan: Plan
    solver: SolverSpec
    latent_shape: tuple[int, int, int, int, int]
    """(1, C, F, H, W)."""
    seed: int
    """Of the initial noise, drawn on the CPU so that every device starts from the same one."""
    guidance: tuple[float, float]
    """Scale for each expert."""
    checkpoint_every: int
    """Steps between saved solver states; 0 saves none."""

    def to_json(self) -> dict[str, Any]:
        """Plain data; `from_json` is the inverse."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> VideoTask:
        """Rebuild a task from `to_json`, also after a trip through JSON."""
        return cls(
            job=data["job"],
            plan=Plan.from_json(data["plan"]),
            solver=SolverSpec(**data["solver"]),
            latent_shape=tuple(data["latent_shape"]),
            seed=data["seed"],
            guidance=tuple(data["guidance"]),
            checkpoint_every=data["checkpoint_every"],
        )


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
        """Inverse of `to_bytes`; a torn or foreign file raises `safetensors.SafetensorError` or KeyError."""
        tensors = load(data)
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]
        return cls(
            step=int(header["step"]),
            latents=tensors.pop("latents"),
            tensors={name.removeprefix("solver."): x for name, x in tensors.items()},
            numbers=json.loads(header["numbers"]),
        )
