"""The table of worlds: paths without gaps, one winner among two drivers, nothing left of what was deleted."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from app.driver.job_store import JobStore
from app.worlds.world_state import Chunk, Parent, Timings, World
from app.worlds.world_store import WorldNotFound, WorldStore, WorldTakenOver


def world(name: str = "world_a", **fields: object) -> World:
    return World.model_validate(
        {
            "id": name,
            "model": "m",
            "created_at": 1.0,
            "prompt": "p",
            "seed": 1,
            "width": 32,
            "height": 16,
            "fps": 16,
            "shared": True,
            "image": "a" * 64,
            "root": "b" * 64,
            "material": "{}",
            **fields,
        }
    )


def chunk(number: int) -> Chunk:
    return Chunk(
        key=f"{number:064x}",
        controls="{}",
        frames=8,
        source="generated",
        fast_forward_k=0,
        restored=None,
        replayed=number,
        gang="g",
        timings=Timings(waited=0.25, model=0.5),
    )


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/worlds.db"


@pytest.fixture
def store(url: str) -> Iterator[WorldStore]:
    store = WorldStore(url)
    yield store
    store.close()


def test_a_path_is_found_by_another_process_as_it_was_left(store: WorldStore, url: str):
    stored = store.create(world(), [], 1.0)
    for number in range(3):
        store.append(stored, chunk(number), 2.0 + number)
    store.truncate(stored, 1, 9.0)
    store.append(stored, chunk(7), 10.0)
    other = WorldStore(url)
    found = other.get("world_a")
    other.close()
    assert (found.world, found.chunks) == (world(), [chunk(0), chunk(7)])
    assert (found.revision, found.used_at) == (stored.revision, 10.0)
    assert stored.chunks == found.chunks


def test_of_two_drivers_one_wins(store: WorldStore):
    store.create(world(), [], 1.0)
    mine, theirs = store.get("world_a"), store.get("world_a")
    store.append(theirs, chunk(0), 2.0)
    with pytest.raises(WorldTakenOver, match="world_a"):
        store.append(mine, chunk(1), 2.0)
    with pytest.raises(WorldTakenOver):
        store.truncate(mine, 0, 2.0)
    assert mine.chunks == []
    assert store.get("world_a").chunks == [chunk(0)]


def test_a_fork_begins_with_its_parents_chunks(store: WorldStore):
    store.create(world(), [], 1.0)
    twin = world("world_b", parent=Parent(world="world_a", chunks=2))
    store.create(twin, [chunk(0), chunk(1)], 1.0)
    assert store.get("world_b").chunks == [chunk(0), chunk(1)]
    assert store.get("world_b").world.parent == Parent(world="world_a", chunks=2)
    assert store.get("world_a").chunks == []


def test_what_is_deleted_is_gone_with_its_chunks(store: WorldStore):
    stored = store.create(world(), [chunk(0)], 1.0)
    store.delete("world_a")
    for gone in (lambda: store.get("world_a"), lambda: store.delete("world_a")):
        with pytest.raises(WorldNotFound, match="world_a"):
            gone()
    with pytest.raises(WorldTakenOver):
        store.append(stored, chunk(1), 2.0)
    store.create(world(), [], 1.0)
    assert store.get("world_a").chunks == []


def test_pages_are_in_order_of_creation(store: WorldStore):
    for name in "abc":
        store.create(world(f"world_{name}"), [], 1.0)
    assert store.count() == 3
    assert store.ids(2, None, "desc") == ("world_c", "world_b")
    assert store.ids(2, "world_b", "desc") == ("world_a",)
    assert store.ids(5, "world_a", "asc") == ("world_b", "world_c")
    with pytest.raises(WorldNotFound):
        store.ids(2, "world_x", "asc")


def test_jobs_and_worlds_share_a_database(store: WorldStore, url: str):
    jobs = JobStore(url)
    store.create(world(), [], 1.0)
    assert sum(jobs.counts().values()) == 0
    jobs.close()
