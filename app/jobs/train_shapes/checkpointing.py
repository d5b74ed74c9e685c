"""State of a training stage on disk, and the averaged weights it ends with.

A stage that is stopped after step k and started again goes on with step k+1. Every draw of a step is seeded by (seed,
stage, step), so no random state needs keeping.
"""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from app.jobs.train_shapes.pace import Pace


class Average:
    """Exponential moving average of a module's parameters; `decay` ramps up, so that early steps are forgotten soon."""

    def __init__(self, module: nn.Module, decay: float):
        self.decay = decay
        self.source: list[Tensor] = list(module.parameters())
        self.module: Any = copy.deepcopy(module).requires_grad_(False)
        self.target: list[Tensor] = list(self.module.parameters())

    @torch.no_grad()
    def update(self, step: int) -> None:
        """After optimizer step `step`, counted from 0."""
        decay = min(self.decay, (1 + step) / (10 + step))
        torch._foreach_lerp_(self.target, self.source, 1 - decay)


def save_state(path: Path, **parts: object) -> None:
    """Writes state dicts and plain values to `path`, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(".part")
    torch.save(parts, scratch)
    os.replace(scratch, path)


def load_state(path: Path) -> dict[str, Any] | None:
    """What `save_state` wrote; None when there is nothing to resume from."""
    return torch.load(path, map_location="cpu", weights_only=True) if path.exists() else None


def save_training(
    path: Path, model: nn.Module, average: Average, optimizers: Sequence[Optimizer], losses: Sequence[Any], steps: int
) -> None:
    """Writes all that `resume_training` needs.  losses: numbers or scalar tensors, one a step."""
    save_state(
        path,
        model=model.state_dict(),
        average=average.module.state_dict(),
        optimizers=[optimizer.state_dict() for optimizer in optimizers],
        losses=[float(loss) for loss in losses],
        steps=steps,
    )


def resume_training(
    path: Path, model: nn.Module, average: Average, optimizers: Sequence[Optimizer], pace: Pace
) -> list[Any]:
    """Puts everything where a stopped run left it; returns the losses so far, none when there was no run."""
    state = load_state(path)
    if state is None:
        return []
    model.load_state_dict(state["model"])
    average.module.load_state_dict(state["average"])
    for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(saved)
    pace.resume(len(state["losses"]), state["steps"])
    print(f"{path.stem.removesuffix('_state')}: goes on at step {pace.step} of {pace.steps}", flush=True)
    return list(state["losses"])


def rate_at(step: int, steps: int, warmup: int) -> float:
    """Factor on the learning rate: linear to 1 over `warmup` steps, then a half cosine to 0 at `steps`."""
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


def finite(loss: Tensor, step: int) -> float:
    """The loss as a number; raises when it is not finite, since every later step would be wasted."""
    value = float(loss.detach())
    if not math.isfinite(value):
        raise FloatingPointError(
            f"loss: got {value} at step {step}, expected a finite number; lower the learning rate and resume from "
            f"the last state"
        )
    return value
