"""Which replica has a world: the same one each time, and only a lost replica's worlds move."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from deployments.lingbot.session_router import SessionRouter

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def pending(session: str) -> Any:
    context = SimpleNamespace(should_backoff=False)
    return SimpleNamespace(metadata=SimpleNamespace(session_id=session), routing_context=context)


async def choose(candidates: list[Any], request: Any) -> list[list[Any]]:
    # Serve constructs routers with a dozen of its own parts, none of which the choice uses.
    return await SessionRouter.choose_replicas(SessionRouter.__new__(SessionRouter), candidates, request)


REPLICAS = [SimpleNamespace(replica_id=f"r{n}") for n in range(3)]
WORLDS = [f"world_{n}" for n in range(60)]


async def homes(candidates: list[Any]) -> dict[str, str]:
    return {world: (await choose(candidates, pending(world)))[0][0].replica_id for world in WORLDS}


async def test_a_world_stays_and_worlds_are_spread():
    placed = await homes(REPLICAS)
    assert placed == await homes(REPLICAS[::-1])
    # 20 each on average; fewer than 8 of 60 at one of three would be chance once in 10,000 choices of names
    assert min(list(placed.values()).count(r.replica_id) for r in REPLICAS) >= 8


async def test_only_the_worlds_of_a_lost_replica_move():
    before, after = await homes(REPLICAS), await homes(REPLICAS[1:])
    assert {w for w in WORLDS if before[w] != after[w]} == {w for w in WORLDS if before[w] == "r0"}


async def test_without_a_replica_serve_is_told_to_wait():
    request = pending("world_1")
    assert await choose([], request) == []
    assert request.routing_context.should_backoff
    assert await choose(REPLICAS, None) == [REPLICAS]
