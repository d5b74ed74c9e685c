"""What fixes a solver's timesteps.  Imports no torch before a solver is built: the driver builds few."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from diffusers import FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler

SHIFT_FIELD = {"UniPCMultistepScheduler": "flow_shift", "FlowMatchEulerDiscreteScheduler": "shift"}
"""The scheduler classes of diffusers that are served, and what each calls the flow shift."""
_DEFAULT_ORDER = {"UniPCMultistepScheduler": 2, "FlowMatchEulerDiscreteScheduler": 1}
"""Of a scheduler_config.json that names none (diffusers 0.42)."""


@dataclass(frozen=True)
class SolverSpec:
    """Everything that fixes a solver's timesteps."""

    scheduler: str
    """Class name, a key of `SHIFT_FIELD`."""
    config: dict[str, Any]
    """The checkpoint's scheduler_config.json."""
    steps: int
    flow_shift: float
    boundary_ratio: float | None
    """Two experts: `transformer` while t >= boundary_ratio * num_train_timesteps, then `transformer_2`."""

    @property
    def order(self) -> int:
        """Earlier predictions that a step looks at, the present one included."""
        return int(self.config.get("solver_order", _DEFAULT_ORDER[self.scheduler]))

    def build(self, device: torch.device | str) -> UniPCMultistepScheduler | FlowMatchEulerDiscreteScheduler:
        """A fresh scheduler with its timesteps set; schedulers carry history, so requests never share one."""
        import diffusers  # here: eight seconds of a small machine, which a driver of models with one expert saves

        cls = getattr(diffusers, self.scheduler)
        scheduler = cls.from_config(self.config, **{SHIFT_FIELD[self.scheduler]: self.flow_shift})
        scheduler.set_timesteps(self.steps, device=device)
        return scheduler

    def experts(self) -> list[int]:
        """The expert of each step, by the rule of diffusers' `WanPipeline.__call__`."""
        if self.boundary_ratio is None:
            return [0] * self.steps
        scheduler = self.build("cpu")
        boundary = self.boundary_ratio * scheduler.config.num_train_timesteps
        return [0 if t >= boundary else 1 for t in scheduler.timesteps.tolist()]
