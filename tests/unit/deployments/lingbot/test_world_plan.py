"""The plan's passes, its DAG and its times by hand."""

from __future__ import annotations

import json

import pytest

from deployments.lingbot.world_plan import Node, Pass, WorldPlan

GENERATE = (Pass("denoise", 2, 0), Pass("denoise", 2, 1), Pass("clean", 2))


def seconds(node: Node) -> float:
    return {"restore": 3.0, "denoise": 2.0, "solve": 0.5, "clean": 1.0}[node.op]


def test_a_generated_chunk_on_two_stages() -> None:
    plan = WorldPlan(2, GENERATE, 2)
    assert [(n.op, n.stage, n.after) for n in plan.nodes] == [
        ("denoise", 0, ()),
        ("denoise", 1, (0,)),
        ("solve", 1, (1,)),
        ("denoise", 0, (0, 2)),
        ("denoise", 1, (2, 3)),
        ("solve", 1, (4,)),
        ("clean", 0, (3, 5)),
        ("clean", 1, (5, 6)),
    ]
    # One after another: 2 x (2 + 2 + .5) + 1 + 1, and a hop of .1 for each of the 5 edges between the ranks.
    assert plan.simulate(seconds) == 11
    assert plan.simulate(seconds, hop=0.1) == pytest.approx(11.5)


def test_replayed_chunks_overlap_on_the_stages_and_restores_are_independent() -> None:
    replay = WorldPlan(2, tuple(Pass("clean", chunk) for chunk in range(4)), 0)
    assert replay.simulate(seconds) == 5  # four on the first stage, one more on the second
    restore = WorldPlan(3, (Pass("restore", 4), Pass("clean", 4)), 0)
    assert [n.after for n in restore.nodes[:3]] == [(), (), ()]
    assert restore.simulate(seconds) == 6


@pytest.mark.parametrize(
    "passes",
    [
        (Pass("clean", 0), Pass("restore", 1)),
        (Pass("restore", 1), Pass("clean", 2)),
        (Pass("clean", 0), Pass("clean", 2)),
        (Pass("denoise", 0), Pass("clean", 1)),
        (Pass("clean", 0), Pass("clean", 0)),
    ],
)
def test_passes_out_of_order_are_refused(passes: tuple[Pass, ...]) -> None:
    with pytest.raises(ValueError, match="plan: got"):
        WorldPlan(1, passes, 0)
    with pytest.raises(ValueError, match="plan: got 0 stages"):
        WorldPlan(0, (), 0)


def test_plain_data_and_digest() -> None:
    plan = WorldPlan(2, GENERATE, 2)
    assert WorldPlan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
    assert 0 <= plan.digest < 1 << 63
    others = [WorldPlan(1, GENERATE, 2), WorldPlan(2, GENERATE[:2], 2), WorldPlan(2, GENERATE, 1)]
    assert len({plan.digest, *(other.digest for other in others)}) == 4
    assert plan.describe()["digest"] == f"{plan.digest:016x}"
    assert WorldPlan(1, (), 0).simulate(seconds) == 0
