"""A solver takes the scheduler's own steps, on every device, without waiting for it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from deployments.wan.solver import Solver
from deployments.wan.solver_spec import SolverSpec

STEPS = 6
SHAPE = (1, 4, 2, 4, 4)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SCHEDULERS = {
    "UniPCMultistepScheduler": {"prediction_type": "flow_prediction", "use_flow_sigmas": True},
    "FlowMatchEulerDiscreteScheduler": {},
}


def spec(scheduler: str) -> SolverSpec:
    return SolverSpec(scheduler, SCHEDULERS[scheduler], STEPS, 3.0, None)


def predictions(device: str, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(SHAPE, generator=generator).to(device, dtype) for _ in range(STEPS)]


def start(device: str) -> Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)).to(device)


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("device", DEVICES)
def test_steps_equal_those_of_the_plain_scheduler(scheduler: str, dtype: torch.dtype, device: str):
    plain = spec(scheduler).build(torch.device(device))
    plain.set_begin_index(0)
    solver = Solver(spec(scheduler), torch.device(device))
    x = y = start(device)
    for index, prediction in enumerate(predictions(device, dtype)):
        x = plain.step(prediction, plain.timesteps[index], x, return_dict=False)[0]
        y = solver.step(index, prediction, y)
        assert torch.equal(x, y), index


@pytest.mark.parametrize("taken", range(1, STEPS))
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_a_saved_state_goes_on_bit_for_bit(scheduler: str, taken: int):
    given = predictions("cpu", torch.bfloat16)
    solver = Solver(spec(scheduler), torch.device("cpu"))
    x = start("cpu")
    for index in range(taken):
        x = solver.step(index, given[index], x)
    later = Solver(spec(scheduler), torch.device("cpu"), taken)
    later.load_state(*solver.state())
    y = x
    for index in range(taken, STEPS):
        x, y = solver.step(index, given[index], x), later.step(index, given[index], y)
        assert torch.equal(x, y), index


@pytest.mark.gpu
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_no_step_waits_for_the_device(scheduler: str):
    solver, x = Solver(spec(scheduler), torch.device("cuda")), start("cuda")
    given = predictions("cuda", torch.bfloat16)
    solver.step(0, given[0], x)  # libraries are loaded here
    solver = Solver(spec(scheduler), torch.device("cuda"))
    torch.cuda.set_sync_debug_mode("error")
    try:
        for index, prediction in enumerate(given):
            x = solver.step(index, prediction, x)
    finally:
        torch.cuda.set_sync_debug_mode("default")
