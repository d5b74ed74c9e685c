"""The actor on a local Ray: found by name, back from disk after SIGKILL, replaced for another configuration."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from cache_actors.latent_cache_actor import ACTOR_NAME, NAMESPACE, LatentCacheClient, get_or_create
from cache_actors.latent_calls import Lookup, Save
from tests.latents import REPORT, config, identity, latents


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


def test_the_actor_s_life(cluster: None, tmp_path: Path) -> None:
    settings = config(tmp_path / "cache")
    actor = get_or_create(settings)
    client = LatentCacheClient(timeout_s=10)
    ask = Lookup(identity(), "exact", "request", "job", seed_given=True)

    async def first() -> None:
        assert (await client.lookup(ask)).report.decision == "miss"
        taken = await client.offer(
            Save(identity(), "request", "job", REPORT, "exact", {"video.mp4": b"mp4"}, (10, latents(1)))
        )
        assert taken

    asyncio.run(first())
    assert asyncio.run(client.settled(10))
    assert get_or_create(settings) == actor
    assert ray.get_actor(ACTOR_NAME, NAMESPACE) == actor
    assert ray.get(actor.stats.remote())["entries"] == {"result": 1, "state": 1}

    owner = _owner(tmp_path / "cache" / "store" / "lock")
    os.kill(owner, signal.SIGKILL)

    async def after() -> None:
        deadline = time.monotonic() + 60
        while True:
            answer = await client.lookup(ask)
            if answer.report.decision == "hit" or time.monotonic() > deadline:
                break
            assert str(answer.report.reason) in ("index_unavailable", "lookup_timeout", "warming")
            await asyncio.sleep(0.2)
        assert answer.blobs == {"video.mp4": b"mp4"}

    asyncio.run(after())
    assert asyncio.run(client.stored_result(ask)).blobs == {"video.mp4": b"mp4"}

    other = get_or_create(config(tmp_path / "cache", mode="read_only"))
    assert other != actor
    assert ray.get(other.stats.remote())["mode"] == "read_only"
    ray.kill(other)
    away = asyncio.run(client.lookup(ask)).report
    assert (away.decision, str(away.reason)) == ("error", "index_unavailable")
    assert asyncio.run(client.stored_result(ask)) is None

    with pytest.raises(RuntimeError, match=r"similarity_map: unread cannot be read"):
        get_or_create(
            config(tmp_path / "level 2", {"embedder": {"kind": "text_encoder", "dim": 4, "fingerprint": "x"}})
        )


def _owner(lock: Path) -> int:
    """The process that holds a file open, by /proc."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if any(os.path.samefile(fd, lock) for fd in (process / "fd").iterdir() if fd.exists()):
                return int(process.name)
        except (OSError, PermissionError):
            continue
    raise AssertionError(f"nobody holds {lock}")
