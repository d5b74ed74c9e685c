"""Which gang has a world: its own while it lives; new worlds are spread by their names."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from deployments.lingbot.world_gang_router import WorldGangRouter

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def choose(candidates: list[Any], session: str) -> list[list[Any]]:
    request = SimpleNamespace(
        metadata=SimpleNamespace(session_id=session), routing_context=SimpleNamespace(should_backoff=False)
    )
    # Serve constructs routers with a dozen of its own parts, none of which the choice uses.
    found = await WorldGangRouter.choose_replicas(WorldGangRouter.__new__(WorldGangRouter), candidates, request)
    assert request.routing_context.should_backoff
    return found


A0, A1, B0, B1 = (SimpleNamespace(replica_metadata={"gang": gang, "rank": rank}) for gang in "ab" for rank in (0, 1))


async def test_a_world_stays_with_its_gang_while_it_lives():
    for n in range(20):
        assert await choose([A0, A1, B0, B1], f"world_{n}|b") == [[B0]]
        assert await choose([A0, A1], f"world_{n}|b") == [[A0]]


async def test_new_worlds_are_spread_and_always_in_the_same_way():
    homes = [(await choose([A0, A1, B0, B1], f"world_{n}|"))[0][0] for n in range(60)]
    assert homes == [(await choose([B0, A0], f"world_{n}|"))[0][0] for n in range(60)]
    assert 18 <= homes.count(A0) <= 42  # 30 on average; outside once in 600 choices of names


async def test_without_a_rank_0_serve_is_told_to_wait():
    assert await choose([A1, B1], "world_1|a") == []
