"""Plans: their graph, their identity, and what `simulate` says of each topology."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from deployments.plan import BRANCHES, Node, Plan, Step

S = 1.0
"""Time of one stage."""


def plan(stages: int, chains: int, steps: int = 4, branches: int = 2) -> Plan:
    return Plan(stages, chains, BRANCHES[:branches], tuple(Step(index) for index in range(steps)))


def stage_time(node: Node) -> float:
    return 0.0 if node.op == "solve" else S


@pytest.mark.parametrize(
    ("stages", "chains", "requests", "per_step", "busy"),
    [
        # per_step: time until each of the requests has made a step.  A whole model of one stage takes S here too.
        pytest.param(1, 1, 1, 2 * S, 1.0, id="PP1/CFG1: c, u"),
        pytest.param(1, 2, 1, 1 * S, 1.0, id="PP1/CFG2: c and u at once"),
        pytest.param(2, 1, 1, 3 * S, 2 / 3, id="PP2/CFG1: c0, (u0 and c1), u1"),
        pytest.param(2, 1, 2, 4 * S, 1.0, id="PP2/CFG1, 2 requests: twice the throughput"),
        pytest.param(2, 2, 1, 2 * S, 0.5, id="PP2/CFG2: two chains"),
        pytest.param(2, 2, 2, 2 * S, 1.0, id="PP2/CFG2, 2 requests in antiphase"),
        pytest.param(4, 2, 4, 4 * S, 1.0, id="PP4/CFG2, 4 requests"),
        pytest.param(4, 2, 1, 4 * S, 0.25, id="PP4/CFG2 alone"),
    ],
)
def test_topologies(stages: int, chains: int, requests: int, per_step: float, busy: float):
    """Many steps, so that filling and draining the pipeline count for less than the 2 % allowed."""
    steps = 400
    found = plan(stages, chains, steps).simulate(stage_time, requests=requests)
    assert found.makespan / steps == pytest.approx(per_step, rel=0.02)
    assert found.busy == pytest.approx([busy] * (stages * chains), rel=0.02)


def test_one_request_through_two_stages_by_hand():
    """c0 0-1, u0 and c1 1-2, u1 2-3; the next step starts at 3.  No rounding, no warm-up: exactly 3S a step."""
    assert plan(2, 1, steps=1).simulate(stage_time).makespan == 3.0
    assert plan(2, 1, steps=5).simulate(stage_time).makespan == 15.0


def test_a_hop_delays_each_crossing():
    """c0 0-1, on the way 1-1.5, c1 1.5-2.5, u1 2.5-3.5 (u0 was there at 2.5), latents back at 4."""
    assert plan(2, 1, steps=2).simulate(stage_time, hop=0.5).makespan == 4.0 + 3.5


def test_skipped_steps_save_what_the_table_says():
    """Aligned reuse of a step saves the whole step: all stages, both branches."""
    steps = tuple(Step(index, "reuse" if index % 2 else "full") for index in range(10))
    reusing = replace(plan(2, 1, 10), steps=steps)
    found = reusing.simulate(lambda node: S if node.op == "full" else 0.0)
    assert found.makespan == 5 * 3.0


def test_without_guidance_the_second_chain_idles():
    found = plan(2, 2, 10, branches=1).simulate(stage_time)
    assert found.makespan == 20.0
    assert found.busy == (0.5, 0.5, 0.0, 0.0)


def test_nodes_by_hand():
    nodes = plan(2, 2, steps=2).nodes
    assert [(n.step, n.branch, n.stage, n.op, n.rank, n.after) for n in nodes] == [
        (0, "positive", 0, "full", 0, ()),
        (0, "positive", 1, "full", 1, (0,)),
        (0, "negative", 0, "full", 2, ()),
        (0, "negative", 1, "full", 3, (2,)),
        (0, "positive", 1, "solve", 1, (1, 3)),
        (1, "positive", 0, "full", 0, (4,)),
        (1, "positive", 1, "full", 1, (5,)),
        (1, "negative", 0, "full", 2, (4,)),
        (1, "negative", 1, "full", 3, (7,)),
        (1, "positive", 1, "solve", 1, (6, 8)),
    ]


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("chains", [1, 2])
@pytest.mark.parametrize("branches", [1, 2])
def test_the_graph_is_one_of_earlier_nodes_that_uses_every_output(stages: int, chains: int, branches: int):
    nodes = plan(stages, chains, 3, branches).nodes
    assert all(before < index for index, node in enumerate(nodes) for before in node.after)
    used = {before for node in nodes for before in node.after}
    assert used == set(range(len(nodes) - 1))  # all but the last update
    assert {node.rank for node in nodes} <= set(range(stages * chains))
    assert len(nodes) == 3 * (branches * stages + 1)


def test_json_and_back():
    steps = (Step(3), Step(4, "reuse", 1), Step(5, "full", 1))
    original = Plan(2, 1, BRANCHES, steps)
    again = Plan.from_json(json.loads(json.dumps(original.to_json())))
    assert again == original
    assert again.digest == original.digest
    assert 0 <= original.digest < 2**63


def test_whatever_differs_changes_the_digest():
    base = plan(2, 1)
    others = [
        plan(1, 1),
        plan(2, 2),
        plan(2, 1, steps=5),
        plan(2, 1, branches=1),
        replace(base, steps=tuple(replace(step, expert=1) for step in base.steps)),
        replace(base, steps=(*base.steps[:3], Step(3, "reuse"))),
        replace(base, steps=tuple(Step(index + 1) for index in range(4))),
    ]
    assert len({base.digest, *(other.digest for other in others)}) == len(others) + 1
    assert base.describe()["digest"] == f"{base.digest:016x}"


def test_impossible_plans_are_refused():
    with pytest.raises(ValueError, match="0 stages and 1 chains"):
        plan(0, 1)
    with pytest.raises(ValueError, match="3 chains"):
        plan(1, 3)
    with pytest.raises(ValueError, match="got branches"):
        Plan(1, 1, ("negative",), (Step(0),))
    with pytest.raises(ValueError, match=r"got step indices \[0, 2\], expected consecutive"):
        Plan(1, 1, BRANCHES, (Step(0), Step(2)))
