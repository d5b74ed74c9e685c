"""Which replica gets a call: a rank 0, the pinned one while it lives."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from deployments.gang.router import GangRouter

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def replica(gang: str, rank: int) -> Any:
    return SimpleNamespace(replica_metadata={"gang": gang, "rank": rank})


def pending(session: str) -> Any:
    context = SimpleNamespace(should_backoff=False)
    return SimpleNamespace(metadata=SimpleNamespace(session_id=session), routing_context=context)


async def choose(candidates: list[Any], request: Any) -> list[list[Any]]:
    # Serve constructs routers with a dozen of its own parts, none of which the choice uses.
    return await GangRouter.choose_replicas(GangRouter.__new__(GangRouter), candidates, request)


A0, A1, B0, B1 = (replica(gang, rank) for gang in "ab" for rank in (0, 1))


async def test_only_rank_0_is_chosen():
    assert await choose([A1, B0, A0, B1], pending("")) == [[B0, A0]]


async def test_the_pinned_gang_is_chosen_while_it_lives():
    assert await choose([A0, A1, B0, B1], pending("b")) == [[B0]]


async def test_another_gang_takes_over_for_one_that_is_gone():
    assert await choose([A0, A1], pending("b")) == [[A0]]


async def test_serve_is_told_to_wait_where_no_rank_0_is_up():
    request = pending("a")
    assert await choose([A1], request) == []
    assert request.routing_context.should_backoff  # or Serve would ask again without a pause
    assert await choose([], pending("")) == []


async def test_a_replica_of_another_kind_is_passed_over():
    assert await choose([SimpleNamespace(replica_metadata={}), A0], pending("")) == [[A0]]


async def test_serve_asks_without_a_request_too():
    assert await choose([A0, A1], None) == [[A0]]
