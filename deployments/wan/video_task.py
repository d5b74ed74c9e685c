"""One video as a gang sees it: what rank 0 is given and passes on to every rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from deployments.plan import Plan
from deployments.wan.solver_spec import SolverSpec


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
    donor_steps: tuple[int, ...] = ()
    """Steps whose entering latents are stored for other requests."""

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
            donor_steps=tuple(data["donor_steps"]),
        )
