"""The world cache as an actor: errors keep their types, and a killed one loses no chunk whose `put` returned."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from cache_actors.blob_store import SaveRefused
from cache_actors.keys import path_keys, world_root
from cache_actors.world_cache import NodeGone
from cache_actors.world_cache_actor import ACTOR_NAME, NAMESPACE, WorldCacheAway, WorldCacheClient, get_or_create
from cache_actors.world_config import WorldCacheConfig
from tests.world_material import MATERIAL

ROOT = world_root(MATERIAL)
PATH = [f"chunk {i}".encode() for i in range(24)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    ray.init(
        address="local",
        num_cpus=1,
        include_dashboard=False,
        object_store_memory=80 * 2**20,  # Ray's minimum is 75 MiB
        _temp_dir=str(tmp_path_factory.mktemp("r")),
        runtime_env={"env_vars": {"PYTHONPATH": str(Path(__file__).parents[3])}},
        log_to_driver=False,
    )
    yield
    ray.shutdown()


def config(folder: Path, budget_gib: float = 0.1) -> WorldCacheConfig:
    return WorldCacheConfig(root=str(folder), budget_gib=budget_gib)


def journal(chunk: int) -> bytes:
    """Too large to travel inside a call: 200 kB."""
    return bytes([chunk]) * 200_000


def owner(folder: Path) -> int:
    """The process that holds the folder's lock file open, by /proc."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if any(os.path.samefile(fd, folder / "lock") for fd in (process / "fd").iterdir() if fd.exists()):
                return int(process.name)
        except (OSError, PermissionError):
            continue
    raise AssertionError(f"nobody holds {folder}")


def test_killed_at_any_moment_it_loses_no_committed_chunk(cluster: None, tmp_path: Path) -> None:
    """Three kills while chunks are being stored; the storing session sees none of them."""
    client = WorldCacheClient(get_or_create(config(tmp_path)))
    keys, killed = path_keys(ROOT, PATH), 0

    async def store() -> None:
        nonlocal killed
        assert await client.open_world(MATERIAL) == ROOT
        parent = ROOT
        for chunk, action in enumerate(PATH):
            putting = asyncio.ensure_future(client.put(ROOT, parent, action, journal(chunk)))
            if chunk in (3, 10, 17):
                await asyncio.sleep(0.002 * killed)  # before, in and after the write
                os.kill(owner(tmp_path), signal.SIGKILL)
                killed += 1
            parent = await putting
            assert parent == keys[chunk]
        os.kill(owner(tmp_path), signal.SIGKILL)

    async def check() -> None:
        assert [found.key for found in await client.match(ROOT, PATH)] == keys
        for chunk, key in enumerate(keys):
            assert await client.read(key) == journal(chunk)
        stats = await client.stats()
        assert (stats["chunks"], stats["quarantined"], stats["hit"]) == (24, 0, 24)

    asyncio.run(store())
    asyncio.run(check())
    assert killed == 3


def test_methods_and_errors_are_those_of_the_cache(cluster: None, tmp_path: Path) -> None:
    client = WorldCacheClient(get_or_create(config(tmp_path, budget_gib=0.002), name="small"))

    async def play() -> None:
        await client.open_world(MATERIAL)
        key = await client.put(ROOT, ROOT, b"w", b"journal")
        await client.put_frames(key, b"frames")
        assert await client.read_frames(key) == b"frames"
        await client.note_kv("gang", key)
        found = await client.find(key)
        assert found is not None
        assert (found.depth, found.has_frames, found.kv_holders) == (1, True, frozenset({"gang"}))
        await client.forget_kv("gang")
        await client.pin(key, "demo")
        assert not await client.evict(key)
        await client.unpin(key)
        assert await client.evict(key)
        with pytest.raises(NodeGone) as gone:
            await client.read(key)
        assert type(gone.value) is NodeGone
        with pytest.raises(KeyError, match="is not known"):
            await client.put(ROOT, key, b"d", b"")
        with pytest.raises(SaveRefused) as refused:
            await client.put(ROOT, ROOT, b"d", bytes(3 << 20))
        assert refused.value.reason == "too_large"

    asyncio.run(play())


def test_one_actor_a_name_and_another_configuration_replaces_it(cluster: None, tmp_path: Path) -> None:
    first = get_or_create(config(tmp_path))
    assert get_or_create(config(tmp_path)) == first
    assert ray.get_actor(ACTOR_NAME, NAMESPACE) == first
    second = get_or_create(config(tmp_path, budget_gib=0.2))
    assert second != first

    async def ask() -> None:
        assert (await WorldCacheClient(second).stats())["budget_bytes"] == int(0.2 * 2**30)
        with pytest.raises(WorldCacheAway, match="its actor has ended"):
            await WorldCacheClient(first).stats()

    asyncio.run(ask())


def test_a_folder_that_cannot_be_had_is_said_at_the_start(cluster: None, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RuntimeError, match=r"its actor cannot start(.|\n)*cannot be used"):
        get_or_create(config(tmp_path / "file" / "worlds"), name="nowhere")


def test_no_answer_in_time_is_said(cluster: None, tmp_path: Path) -> None:
    actor = get_or_create(config(tmp_path), name="slow")
    os.kill(owner(tmp_path), signal.SIGSTOP)
    try:
        started = time.monotonic()
        with pytest.raises(WorldCacheAway, match=r"no answer within 0\.5 s"):
            asyncio.run(WorldCacheClient(actor, timeout_s=0.5).stats())
        assert time.monotonic() - started < 10
    finally:
        os.kill(owner(tmp_path), signal.SIGCONT)
