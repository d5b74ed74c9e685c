"""The two formulas in their precision."""

from __future__ import annotations

import numpy as np
import torch

from deployments.lingbot.sampler import renoise, x0_from_flow


def test_x0_is_computed_in_fp64_with_an_fp32_sigma() -> None:
    x, flow = torch.tensor([1.0]), torch.tensor([3.0])
    expected = np.float32(1.0 - float(np.float32(0.947908878)) * 3.0)
    assert x0_from_flow(x, flow, 0.947908878).item() == expected


def test_renoise_is_computed_in_fp32() -> None:
    s = np.float32(0.825192571)
    x0, noise = torch.tensor([0.3]), torch.tensor([-1.7])
    expected = (np.float32(1) - s) * np.float32(0.3) + s * np.float32(-1.7)
    assert renoise(x0, noise, 0.825192571).item() == expected
