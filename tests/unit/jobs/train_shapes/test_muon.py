from __future__ import annotations

import torch
from torch import nn

from app.jobs.train_shapes.muon import Muon, muon_and_adamw, orthogonal, set_rate


def test_singular_values_come_near_one():
    values = torch.linalg.svdvals(orthogonal(torch.randn(3, 12, 40, generator=torch.Generator().manual_seed(0))))
    assert values.min() > 0.6  # the five steps of the quintic end between 0.7 and 1.2, small values below
    assert values.max() < 1.25


def test_parameters_of_one_shape_are_updated_as_if_alone():
    def trained(together: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        weights = [nn.Parameter(torch.randn(4, 6)) for _ in range(2)]
        optimizers = [Muon(weights, lr=0.1)] if together else [Muon([weight], lr=0.1) for weight in weights]
        for step in range(3):
            for i, weight in enumerate(weights):
                weight.grad = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + i))
            for optimizer in optimizers:
                optimizer.step()
        return weights

    for one, two in zip(trained(True), trained(False), strict=True):
        torch.testing.assert_close(one, two)


def test_an_update_has_the_size_of_an_adamw_step():
    weight = nn.Parameter(torch.zeros(32, 3, 2))  # a convolution counts as [32, 6]
    weight.grad = torch.randn(32, 3, 2)
    Muon([weight], lr=1e-2).step()
    size = float(weight.detach().square().mean().sqrt())
    assert 0.5 * 0.2e-2 < size < 1.5 * 0.2e-2  # 0.2 times the rate, as AdamW's updates were found to be


def test_every_parameter_has_one_optimizer_and_one_rate():
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    optimizers = muon_and_adamw([model[0].weight], model.parameters(), 1e-3, fused=False)
    set_rate(optimizers, 5e-4)
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    assert [len(group["params"]) for group in groups] == [1, 3]
    assert {group["lr"] for group in groups} == {5e-4}
