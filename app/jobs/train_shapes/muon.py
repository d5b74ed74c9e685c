"""Muon for matrices and convolutions of small models: momentum whose update is made orthogonal, all parameters of one
shape at once.

    update = 0.2 * sqrt(max(rows, columns)) * orthogonal(momentum)

The factor gives the update the root mean square of an AdamW step, so that learning rates carry over.

The quintic Newton-Schulz iteration is that of KellerJordan/Muon (muon.py, zeropower_via_newtonschulz5), the scale
that of Moonlight (arXiv 2502.16982). torch.optim.Muon walks parameter by parameter and takes matrices alone; for 64
matrices of 224 x 224 its launches took 28 ms a step on an H200.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor, nn


def orthogonal(stack: Tensor) -> Tensor:
    """[B, rows, columns] -> the nearest matrices with singular values near 1 (0.7 to 1.2), same shape and dtype."""
    x = stack.bfloat16() if stack.is_cuda else stack
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return (x.mT if tall else x).to(stack.dtype)


class Muon(torch.optim.Optimizer):
    """Parameters of two or more dimensions, seen as [first, all others]."""

    def __init__(
        self, parameters: Iterable[nn.Parameter], lr: float, momentum: float = 0.95, weight_decay: float = 0.01
    ):
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # a closure has no use here
        for group in self.param_groups:
            same_shape = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    same_shape[parameter.shape].append(parameter)
            for shape, parameters in same_shape.items():
                moments = [self.state[p].setdefault("momentum", torch.zeros_like(p)) for p in parameters]
                gradients = [p.grad for p in parameters]
                torch._foreach_lerp_(moments, gradients, 1 - group["momentum"])
                ahead = torch._foreach_lerp(gradients, moments, group["momentum"])  # Nesterov
                rows, columns = shape[0], shape[1:].numel()
                updates = orthogonal(torch.stack([u.reshape(rows, columns) for u in ahead])).unbind(0)
                torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
                rate = -group["lr"] * 0.2 * max(rows, columns) ** 0.5
                torch._foreach_add_(parameters, [u.view(shape) for u in updates], alpha=rate)


def muon_and_adamw(
    hidden: list[nn.Parameter], everything: Iterable[nn.Parameter], rate: float, fused: bool
) -> list[torch.optim.Optimizer]:
    """Muon for `hidden`, AdamW for the rest of `everything`; one learning rate serves both."""
    chosen = {id(parameter) for parameter in hidden}
    rest = [parameter for parameter in everything if id(parameter) not in chosen]
    return [Muon(hidden, lr=rate), torch.optim.AdamW(rest, lr=rate, betas=(0.9, 0.98), weight_decay=0.01, fused=fused)]


def set_rate(optimizers: list[torch.optim.Optimizer], rate: float) -> None:
    """The learning rate of the coming step."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = rate
