"""What a reused step costs where full steps have a known length: real ranks whose blocks sleep."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from statistics import median

import pytest
import torch

from deployments.plan import Node, Plan
from tests.checkpoints import write_wan_checkpoint
from tests.gangs import Ask, Waiter
from tests.watched_gangs import WatchedSpec, run_watched

SHAPE = (1, 16, 2, 4, 6)
STEPS = 8
REUSE = (3, 5)
STAGE_S = 0.1
"""One stage of one branch; a whole model of two stages takes T = 0.2 s a branch."""


@pytest.mark.parametrize(
    ("pp", "cfg", "stages"),
    [
        pytest.param(2, 1, 3, id="PP2/CFG1: c0, (u0 and c1), u1: 1.5 T"),
        pytest.param(2, 2, 2, id="PP2/CFG2: c and u at once"),
    ],
)
def test_a_hit_costs_less_than_a_tenth_and_branches_overlap(tmp_path: Path, pp: int, cfg: int, stages: int) -> None:
    folder = str(write_wan_checkpoint(tmp_path / "wan", num_blocks=2))
    records = tmp_path / "records"
    records.mkdir()
    text = {branch: torch.ones(1, 32, 32) for branch in ("positive", "negative")}
    spec = WatchedSpec(folder, pp, cfg, records=str(records), stack_seconds=STAGE_S)
    warm, timed = Ask("warm", text, SHAPE, 2), Ask("timed", text, SHAPE, STEPS, reuse=REUSE)
    gang = tmp_path / "gang"
    gang.mkdir()
    *_, ranks = run_watched(spec, [warm, timed], gang)
    began = [step.began for step in ranks[0].requests[-1].steps]
    seconds = [later - earlier for earlier, later in pairwise(began)]
    full = [seconds[step] for step in range(STEPS - 1) if step not in REUSE]
    # Sleeping takes what it takes on any machine; half a stage above it is for a machine that others use.
    assert STAGE_S * stages <= median(full) < STAGE_S * (stages + 0.5)
    # A hit takes about a millisecond of computing, so a busy machine can delay one by many times that, hardly both.
    assert min(seconds[step] for step in REUSE) < 0.1 * median(full)

    def asleep(node: Node) -> float:
        return STAGE_S if node.op == "full" else 0.0

    plan = Plan.from_json(timed.submission(spec, Waiter()).spec["task"]["plan"])
    assert plan.simulate(asleep).makespan == pytest.approx(stages * STAGE_S * (STEPS - len(REUSE)))
