"""The solver of one request: a diffusers scheduler object of its own, its state, and its way through two experts.

Axes: B batch, C latent channel, F latent frame, H/W latent height and width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from diffusers import UniPCMultistepScheduler
from torch import Tensor
from torch.overrides import TorchFunctionMode

from deployments.wan.solver_spec import SolverSpec


class _NoWait(TorchFunctionMode):
    """Takes two waits for the device out of a scheduler's step and leaves its arithmetic as it is.

    `torch.linalg.solve` asks the device whether the matrix was singular; UniPC's 2x2 never is.
    ``sigmas[i].to(device)`` is a blocking copy where the scheduler keeps its sigmas on the CPU; a copy is there before.
    The sigmas themselves must stay where they are: a CPU scalar times a bf16 prediction is multiplied in fp32, a scalar
    on the GPU would be rounded to bf16 first, up to 0.4 % off.
    """

    def __init__(self, sigmas: Tensor, device: torch.device) -> None:
        super().__init__()
        self._sigmas, self._on_device = sigmas, sigmas.to(device)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.linalg.solve:
            return torch.linalg.solve_ex(*args, **(kwargs or {}))[0]
        if func is torch.Tensor.to and self._is_sigma(args[0]):
            return self._on_device[args[0].storage_offset()]
        return func(*args, **(kwargs or {}))

    def _is_sigma(self, x: Tensor) -> bool:
        """An element of the scheduler's sigmas: a view, whose offset is its position."""
        return x.ndim == 0 and x.untyped_storage().data_ptr() == self._sigmas.untyped_storage().data_ptr()


class Solver:
    """Advances one request's latents, one step a call, with no wait of the host for the device.

    The arithmetic is the scheduler's own, so latents equal `WanPipeline`'s bit for bit.
    """

    def __init__(self, spec: SolverSpec, device: torch.device, start: int = 0) -> None:
        self._scheduler = spec.build(device)
        self._scheduler.set_begin_index(start)
        self._device = device
        self.timesteps: Tensor = self._scheduler.timesteps
        """[steps], on the device, the scheduler's dtype."""
        self.sigmas: tuple[float, ...] = tuple(self._scheduler.sigmas.tolist())
        """On the host, one more than steps."""
        self._no_wait = _NoWait(self._scheduler.sigmas, device)

    def step(self, index: int, prediction: Tensor, latents: Tensor) -> Tensor:
        """The latents after step `index`.

        prediction: [B, C, F, H, W], model dtype, after guidance.  latents: of that shape, fp32, entering the step.
        """
        with self._no_wait:
            return self._scheduler.step(prediction, self.timesteps[index], latents, return_dict=False)[0]

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """History beside the latents: tensors (on the device, not copied) and numbers; empty for a one-step solver.

        All of it is needed: without `last_sample` or `lower_order_nums` the scheduler goes on, wrongly and in silence.
        """
        s = self._scheduler
        if not isinstance(s, UniPCMultistepScheduler):
            return {}, {}
        tensors = {f"model_outputs.{i}": x for i, x in enumerate(s.model_outputs) if x is not None}
        if s.last_sample is not None:
            tensors["last_sample"] = s.last_sample
        numbers = {
            "lower_order_nums": s.lower_order_nums,
            "this_order": getattr(s, "this_order", None),
            # Positions, not values: int64 timesteps repeat in dense schedules.
            "timestep_list": [None if t is None else self._step_of(t) for t in s.timestep_list],
        }
        return tensors, numbers

    def load_state(self, tensors: dict[str, Tensor], numbers: dict[str, Any]) -> None:
        """Inverse of `state`, on a solver made with the `start` at which the state was taken."""
        s = self._scheduler
        if not isinstance(s, UniPCMultistepScheduler):
            return
        order = s.config.solver_order
        s.model_outputs = [self._move(tensors.get(f"model_outputs.{i}")) for i in range(order)]
        s.last_sample = self._move(tensors.get("last_sample"))
        s.lower_order_nums = numbers["lower_order_nums"]
        if numbers["this_order"] is not None:
            s.this_order = numbers["this_order"]
        s.timestep_list = [None if i is None else self.timesteps[i] for i in numbers["timestep_list"]]

    def _move(self, tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.to(self._device)

    def _step_of(self, timestep: Tensor) -> int:
        """`timestep_list` holds views of `timesteps`; the view's offset is its position, without a device read."""
        return int(timestep.storage_offset())
