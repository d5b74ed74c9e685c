"""The world cache as one detached, named actor on the head node: placement, lifetime, metrics and nothing else.

The actor survives the application.  Killed, it starts again and reads its folder back: a chunk whose `put` returned is
found again.  Every method may run twice with the same outcome, so calls that met the death are sent again by Ray.

Threads of their own for looking up, reading and writing: a disk write delays no lookup and no read.  One writer makes
two sessions that store the same chunk take turns.  Who keeps keys and values is not stored: holders say it again.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import ray
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError
from ray.util import metrics

from cache_actors.blob_store import StoreError
from cache_actors.disk_room import check_disk
from cache_actors.keys import Key, WorldMaterial
from cache_actors.world_cache import Found, WorldCache
from cache_actors.world_config import WorldCacheConfig

NAMESPACE = "worldstage"
ACTOR_NAME = "world-cache"

_OWNER_WAIT_S = 30.0
"""How long the folder may still belong to a process that is being killed."""
_UPKEEP_S = 10.0
"""Between sweeps of expired chunks and exports of metrics."""

T = TypeVar("T")


class WorldCacheAway(RuntimeError):
    """The actor has ended for good, or did not answer in time."""


class WorldCacheHost:
    """What runs in the actor; every method is that of `WorldCache`.  config_json: a `WorldCacheConfig`."""

    def __init__(self, config_json: str) -> None:
        self._config_json = config_json
        self._cache = _open(WorldCacheConfig.model_validate_json(config_json))
        self._metrics = _Metrics()
        threading.Thread(target=self._upkeep, name="world-upkeep", daemon=True).start()

    @ray.method(concurrency_group="find")
    def find(self, key: Key) -> Found | None:
        """Index only."""
        return self._cache.find(key)

    @ray.method(concurrency_group="find")
    def match(self, root: Key, actions: Sequence[bytes]) -> list[Found]:
        """Index only."""
        return self._cache.match(root, actions)

    @ray.method(concurrency_group="find")
    def note_kv(self, holder: str, key: Key) -> None:
        """Index only."""
        self._cache.note_kv(holder, key)

    @ray.method(concurrency_group="find")
    def forget_kv(self, holder: str, key: Key | None) -> None:
        """Index only."""
        self._cache.forget_kv(holder, key)

    @ray.method(concurrency_group="read")
    def read(self, key: Key) -> bytes:
        """Reads the disk."""
        return self._cache.read(key)

    @ray.method(concurrency_group="read")
    def read_frames(self, key: Key) -> bytes:
        """Reads the disk."""
        return self._cache.read_frames(key)

    @ray.method(concurrency_group="write")
    def open_world(self, material: WorldMaterial) -> Key:
        """Writes a new world's material."""
        return self._cache.open_world(material)

    @ray.method(concurrency_group="write")
    def put(self, root: Key, parent: Key, action: bytes, journal: bytes) -> Key:
        """Writes the disk; once it returns, the chunk survives the process."""
        return self._cache.put(root, parent, action, journal)

    @ray.method(concurrency_group="write")
    def put_frames(self, key: Key, frames: bytes) -> None:
        """Writes the disk."""
        self._cache.put_frames(key, frames)

    @ray.method(concurrency_group="write")
    def pin(self, key: Key, owner: str) -> None:
        """Writes the disk."""
        self._cache.pin(key, owner)

    @ray.method(concurrency_group="write")
    def unpin(self, key: Key) -> None:
        """Writes the disk."""
        self._cache.unpin(key)

    @ray.method(concurrency_group="write")
    def evict(self, key: Key) -> bool:
        """Removes from the disk."""
        return self._cache.evict(key)

    @ray.method(concurrency_group="admin")
    def stats(self) -> dict[str, int]:
        """Index only."""
        return self._cache.stats()

    @ray.method(concurrency_group="admin")
    def config_json(self) -> str:
        """What it was started with."""
        return self._config_json

    def _upkeep(self) -> None:
        while True:
            time.sleep(_UPKEEP_S)
            self._cache.sweep()
            self._metrics.export(self._cache.stats())


class _Metrics:
    """What Prometheus sees."""

    def __init__(self) -> None:
        prefix = "worldstage_world_cache"
        self._chunks = metrics.Gauge(f"{prefix}_chunks", "Chunks of all worlds.")
        self._bytes = metrics.Gauge(f"{prefix}_disk_bytes", "Bytes on disk.")
        self._events = metrics.Counter(
            f"{prefix}_events", "Chunks looked up (hit, miss), stored, and gone by why.", tag_keys=("event",)
        )
        self._told: Counter[str] = Counter()

    def export(self, stats: dict[str, int]) -> None:
        self._chunks.set(stats["chunks"])
        self._bytes.set(stats["disk_bytes"])
        for event in ("hit", "miss", "stored", "evicted", "expired", "quarantined"):
            if new := stats[event] - self._told[event]:
                self._events.inc(new, {"event": event})
                self._told[event] = stats[event]


class WorldCacheClient:
    """The actor as a driver sees it: the methods of `WorldCache`, awaited, with its own errors.

    Each of them also raises WorldCacheAway.  A restart of the actor in mid-call is waited for.
    """

    def __init__(self, actor: ActorHandle, timeout_s: float = 60.0) -> None:
        """timeout_s: longest wait for one call, a restart of the actor included."""
        self.actor, self._timeout_s = actor, timeout_s

    async def open_world(self, material: WorldMaterial) -> Key:
        """Raises `world_cache.RootMismatch`, `blob_store.SaveRefused`."""
        return await self._answer(self.actor.open_world.remote(material))

    async def find(self, key: Key) -> Found | None:
        """See `WorldCache.find`."""
        return await self._answer(self.actor.find.remote(key))

    async def match(self, root: Key, actions: Sequence[bytes]) -> list[Found]:
        """See `WorldCache.match`."""
        return await self._answer(self.actor.match.remote(root, list(actions)))

    async def put(self, root: Key, parent: Key, action: bytes, journal: bytes) -> Key:
        """Raises KeyError for an unknown parent, `blob_store.SaveRefused`."""
        return await self._answer(self.actor.put.remote(root, parent, action, journal))

    async def read(self, key: Key) -> bytes:
        """Raises `world_cache.NodeGone`."""
        return await self._answer(self.actor.read.remote(key))

    async def put_frames(self, key: Key, frames: bytes) -> None:
        """Raises `world_cache.NodeGone`, `blob_store.SaveRefused`."""
        await self._answer(self.actor.put_frames.remote(key, frames))

    async def read_frames(self, key: Key) -> bytes:
        """Raises `world_cache.NodeGone`."""
        return await self._answer(self.actor.read_frames.remote(key))

    async def pin(self, key: Key, owner: str) -> None:
        """Raises `world_cache.NodeGone`."""
        await self._answer(self.actor.pin.remote(key, owner))

    async def unpin(self, key: Key) -> None:
        """Raises `world_cache.NodeGone`."""
        await self._answer(self.actor.unpin.remote(key))

    async def evict(self, key: Key) -> bool:
        """See `WorldCache.evict`."""
        return await self._answer(self.actor.evict.remote(key))

    async def note_kv(self, holder: str, key: Key) -> None:
        """See `WorldCache.note_kv`."""
        await self._answer(self.actor.note_kv.remote(holder, key))

    async def forget_kv(self, holder: str, key: Key | None = None) -> None:
        """See `WorldCache.forget_kv`."""
        await self._answer(self.actor.forget_kv.remote(holder, key))

    async def stats(self) -> dict[str, int]:
        """See `WorldCache.stats`."""
        return await self._answer(self.actor.stats.remote())

    async def _answer(self, reference: Awaitable[T]) -> T:
        try:
            return await asyncio.wait_for(reference, self._timeout_s)
        except TimeoutError as error:
            raise WorldCacheAway(f"world cache: no answer within {self._timeout_s} s") from error
        except RayActorError as error:
            raise WorldCacheAway(f"world cache: its actor has ended: {error}") from error
        except RayTaskError as error:
            raise error.cause from error


def get_or_create(config: WorldCacheConfig, name: str = ACTOR_NAME, start_timeout_s: float = 120.0) -> ActorHandle:
    """The actor of that name, started with this configuration; one with another is replaced, its folder kept.

    Raises RuntimeError with the reason when it cannot start.
    """
    wanted = config.model_dump_json()
    host = ray.remote(
        max_restarts=-1,
        max_task_retries=-1,
        concurrency_groups={"find": 2, "read": 4, "write": 1, "admin": 1},
    )(WorldCacheHost)
    options = {
        "name": name,
        "namespace": NAMESPACE,
        "lifetime": "detached",
        "get_if_exists": True,
        "num_cpus": 0,
        # Its folder is on the head node's disk.
        "resources": {"node:__internal_head__": 0.001},
    }
    actor = host.options(**options).remote(wanted)
    if _ask(actor, start_timeout_s) != json.loads(wanted):
        ray.kill(actor, no_restart=True)
        _wait_for_name(name, start_timeout_s)
        actor = host.options(**options).remote(wanted)
        _ask(actor, start_timeout_s)
    return actor


def _ask(actor: ActorHandle, timeout_s: float) -> Any:
    try:
        return json.loads(ray.get(actor.config_json.remote(), timeout=timeout_s))
    except GetTimeoutError as error:
        raise RuntimeError(f"world_cache: its actor did not start within {timeout_s} s") from error
    except RayActorError as error:
        raise RuntimeError(f"world_cache: its actor cannot start: {error}") from error


def _wait_for_name(name: str, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            ray.get_actor(name, NAMESPACE)
        except ValueError:
            return
        time.sleep(0.1)


def _open(config: WorldCacheConfig) -> WorldCache:
    check_disk("world_cache", Path(config.root), config.budget_gib)
    deadline = time.monotonic() + _OWNER_WAIT_S
    while True:
        try:
            return WorldCache(Path(config.root), config.budget_bytes, config.ttl_s)
        except StoreError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)
