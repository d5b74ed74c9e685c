"""Requests become passes."""

from __future__ import annotations

from app.planning.world_plan import world_plan
from deployments.lingbot.fast_forward import ChunkCosts
from deployments.lingbot.sampler_tables import V1_FAST
from deployments.lingbot.stream_config import StreamConfig
from deployments.lingbot.world_plan import Pass, WorldPlan

STREAM = StreamConfig(1, 5, 1, V1_FAST)
COPIES = ChunkCosts(generate=50, clean=10, restore=1, decode=6, frames=1)
REPLAYS = ChunkCosts(generate=50, clean=10, restore=100, decode=6, frames=1)
CHUNK_3 = (*(Pass("denoise", 3, step) for step in range(4)), Pass("clean", 3))


def plan(costs: ChunkCosts, live: int, kept: list[bool], generate: int = 1) -> WorldPlan:
    return world_plan(stages=2, stream=STREAM, costs=costs, live=live, kept=kept, generate=generate, fast_forward=2)


def test_a_live_world_makes_its_next_chunk() -> None:
    assert plan(COPIES, 3, [True] * 3) == WorldPlan(2, CHUNK_3, 2)


def test_a_parked_world_is_restored_or_replayed_first() -> None:
    assert plan(COPIES, 0, [True] * 3).passes == (Pass("restore", 3), *CHUNK_3)
    replay = tuple(Pass("clean", chunk) for chunk in range(3))
    assert plan(REPLAYS, 0, [True] * 3).passes == (*replay, *CHUNK_3)
    assert plan(COPIES, 0, [True, True, False]).passes == (Pass("restore", 2), Pass("clean", 2), *CHUNK_3)


def test_a_world_may_only_be_brought_back() -> None:
    assert plan(COPIES, 3, [True] * 3, generate=0).passes == ()
    assert plan(COPIES, 0, [False], generate=0).passes == (Pass("clean", 0),)
    assert len(plan(COPIES, 0, [], generate=2).passes) == 10
