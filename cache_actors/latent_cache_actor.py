"""The latent cache as one detached, named actor on the head node: placement, lifetime, metrics and nothing else.

Groups of threads, so that no disk write delays a lookup: `lookup`, `save` (which only queues), `flush`, `admin`.  The
actor survives the application; killed, it starts again and reads its folder back.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from collections import Counter
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError
from ray.util import metrics

from cache_actors.blob_store import Pin
from cache_actors.latent_calls import Answer, Lookup, Save
from cache_actors.latent_config import LatentCacheConfig
from cache_actors.latent_entries import EntryFilter
from cache_actors.latent_key import KEY_SCHEMA
from cache_actors.latent_report import CacheReport, Reason
from cache_actors.latent_shadow import ShadowResult
from cache_actors.latent_start import open_cache

NAMESPACE = "worldstage"
ACTOR_NAME = f"latent-cache-v{KEY_SCHEMA}"
"""Another schema is another actor: old and new never share a folder's keys."""

LOOKUP_THREADS = 4
_UPKEEP_S = 10.0
"""Between sweeps of expired entries and exports of gauges."""

logger = logging.getLogger(__name__)


class LatentCacheHost:
    """What runs in the actor.  config_json: a `LatentCacheConfig`."""

    def __init__(self, config_json: str) -> None:
        self._config_json = config_json
        self._cache = open_cache(LatentCacheConfig.model_validate_json(config_json))
        self._metrics = _Metrics()
        threading.Thread(target=self._cache.warm, name="latent-warm", daemon=True).start()
        threading.Thread(target=self._upkeep, name="latent-upkeep", daemon=True).start()

    @ray.method(concurrency_group="lookup")
    def lookup(self, ask: Lookup) -> Answer:
        """As `LatentCache.lookup`."""
        answer = self._cache.lookup(ask)
        self._metrics.looked_up(answer)
        return answer

    @ray.method(concurrency_group="lookup")
    def stored_result(self, ask: Lookup) -> Answer | None:
        """As `LatentCache.stored_result`."""
        answer = self._cache.stored_result(ask)
        if answer is not None:
            self._metrics.looked_up(answer)
        return answer

    @ray.method(concurrency_group="save")
    def offer(self, save: Save) -> bool:
        """As `LatentCache.offer`."""
        return self._cache.offer(save)

    @ray.method(concurrency_group="save")
    def record_shadow(self, result: ShadowResult) -> None:
        """As `LatentCache.record_shadow`."""
        self._cache.record_shadow(result)

    @ray.method(concurrency_group="admin")
    def config_json(self) -> str:
        """What it was started with."""
        return self._config_json

    @ray.method(concurrency_group="admin")
    def stats(self) -> dict[str, Any]:
        """As `LatentCache.stats`."""
        return self._cache.stats()

    @ray.method(concurrency_group="admin")
    def entries(self, which: EntryFilter, limit: int, after: str | None) -> list[dict[str, Any]] | None:
        """As `LatentCache.entries`."""
        return self._cache.entries(which, limit, after)

    @ray.method(concurrency_group="admin")
    def entry(self, name: str) -> dict[str, Any] | None:
        """As `LatentCache.entry`."""
        return self._cache.entry(name)

    @ray.method(concurrency_group="admin")
    def remove(self, name: str) -> bool:
        """As `LatentCache.remove`."""
        return self._cache.remove(name)

    @ray.method(concurrency_group="admin")
    def pin(self, name: str, pin: Pin | None) -> dict[str, Any] | None:
        """As `LatentCache.pin`."""
        return self._cache.pin(name, pin)

    @ray.method(concurrency_group="admin")
    def purge(self, which: EntryFilter, dry_run: bool) -> dict[str, Any]:
        """As `LatentCache.purge`."""
        return self._cache.purge(which, dry_run)

    @ray.method(concurrency_group="flush")
    def flush(self, timeout_s: float) -> bool:
        """As `LatentCache.flush`."""
        return self._cache.flush(timeout_s)

    def _upkeep(self) -> None:
        while True:
            time.sleep(_UPKEEP_S)
            self._cache.sweep()
            self._metrics.export(self._cache.stats())


class _Metrics:
    """What Prometheus sees."""

    def __init__(self) -> None:
        prefix = "worldstage_latent_cache"
        self._lookups = metrics.Counter(
            f"{prefix}_lookups", "Lookups by outcome.", tag_keys=("level", "decision", "reason")
        )
        self._seconds = metrics.Histogram(
            f"{prefix}_lookup_seconds",
            "Time of a lookup in the actor.",
            boundaries=[0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 1],
        )
        self._skipped = metrics.Counter(f"{prefix}_skipped_steps", "Solver steps not run.")
        self._saves = metrics.Counter(f"{prefix}_saves", "Entries by what became of their save.", tag_keys=("result",))
        self._removed = metrics.Counter(f"{prefix}_removed", "Entries by why they left.", tag_keys=("reason",))
        self._bytes = metrics.Gauge(f"{prefix}_disk_bytes", "Bytes on disk.")
        self._queue = metrics.Gauge(f"{prefix}_save_queue_bytes", "Payloads waiting for the disk.")
        self._entries = metrics.Gauge(f"{prefix}_entries", "Entries.", tag_keys=("kind",))
        self._told: Counter[tuple[str, str]] = Counter()

    def looked_up(self, answer: Answer) -> None:
        report = answer.report
        tags = {
            "level": "" if report.level is None else str(report.level),
            "decision": report.decision,
            "reason": str(report.reason or ""),
        }
        self._lookups.inc(1, tags)
        self._seconds.observe(report.lookup_ms / 1000)
        if report.decision == "hit" and not report.shadow and report.skipped_steps:
            self._skipped.inc(report.skipped_steps)

    def export(self, stats: dict[str, Any]) -> None:
        self._bytes.set(stats["disk_bytes"])
        self._queue.set(stats["save_queue_bytes"])
        for kind in ("result", "approx", "state", "donor"):
            self._entries.set(stats["entries"].get(kind, 0), {"kind": kind})
        for metric, tag, counts in (
            (self._saves, "result", stats["saves"]),
            (self._removed, "reason", stats["removed"]),
        ):
            for name, total in counts.items():
                if new := total - self._told[tag, name]:
                    metric.inc(new, {tag: name})
                    self._told[tag, name] = total


class CacheAway(RuntimeError):
    """The actor does not answer, or its answer is a fault of its own."""


class LatentCacheClient:
    """The actor as drivers and operators see it, found by its name whenever it is needed.

    For a driver a cache that is away is a miss that says so, never a failed request; failures are logged and counted.
    """

    def __init__(self, timeout_s: float) -> None:
        """timeout_s: longest wait for an answer, disk reads and transfer of the payload included."""
        self._timeout_s = timeout_s
        self._actor: ActorHandle | None = None
        prefix = "worldstage_latent_cache"
        self._failures = metrics.Counter(f"{prefix}_failures", "Calls that got no answer.", tag_keys=("call",))

    async def lookup(self, ask: Lookup) -> Answer:
        """Never raises but for cancellation."""
        try:
            return await self.call("lookup", ask)
        except CacheAway as away:
            logger.warning("latent cache: the lookup of job %s failed: %s", ask.job_id, away)
            slow = isinstance(away.__cause__, TimeoutError)
            reason = Reason.LOOKUP_TIMEOUT if slow else Reason.INDEX_UNAVAILABLE
            return Answer(CacheReport(decision="error", reason=reason, detail="the cache did not answer"))

    async def stored_result(self, ask: Lookup) -> Answer | None:
        """None also when the cache is away.  Never raises but for cancellation."""
        try:
            return await self.call("stored_result", ask)
        except CacheAway as away:
            logger.warning("latent cache: no answer about job %s: %s", ask.job_id, away)
            return None

    async def offer(self, save: Save) -> bool:
        """Whether the cache took it; False also when it is away."""
        try:
            return bool(await self.call("offer", save))
        except CacheAway as away:
            logger.warning("latent cache: the save of job %s was not taken: %s", save.job_id, away)
            return False

    async def settled(self, timeout_s: float) -> bool:
        """Whether all saves offered so far were done in time."""
        try:
            return bool(await self.call("flush", timeout_s, timeout_s=timeout_s + self._timeout_s))
        except CacheAway:
            return False

    async def call(self, method: str, *args: object, timeout_s: float | None = None) -> Any:
        """A method of `LatentCacheHost`.  Raises CacheAway."""
        try:
            if self._actor is None:
                self._actor = await asyncio.to_thread(ray.get_actor, ACTOR_NAME, NAMESPACE)
            return await asyncio.wait_for(getattr(self._actor, method).remote(*args), timeout_s or self._timeout_s)
        except (TimeoutError, RayActorError, RayTaskError, ValueError) as error:  # ValueError: nobody has the name
            if isinstance(error, RayActorError):
                self._actor = None  # the name may belong to another one by now
            self._failures.inc(1, {"call": method})
            raise CacheAway(f"{method}: {error!r}") from error


def get_or_create(config: LatentCacheConfig, start_timeout_s: float = 120.0) -> ActorHandle:
    """The one actor, started with this configuration; one with another configuration is replaced, its folder kept.

    Raises RuntimeError with the reason when it cannot start.
    """
    wanted = config.model_dump_json()
    host = ray.remote(
        max_restarts=-1,
        max_task_retries=0,
        concurrency_groups={"lookup": LOOKUP_THREADS, "save": 1, "flush": 8, "admin": 2},
    )(LatentCacheHost)
    options = {
        "name": ACTOR_NAME,
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
        _wait_for_name(start_timeout_s)
        actor = host.options(**options).remote(wanted)
        _ask(actor, start_timeout_s)
    return actor


def _ask(actor: ActorHandle, timeout_s: float) -> Any:
    try:
        return json.loads(ray.get(actor.config_json.remote(), timeout=timeout_s))
    except GetTimeoutError as error:
        raise RuntimeError(f"latent_cache: its actor did not start within {timeout_s} s") from error
    except RayActorError as error:
        why = str(error).strip().splitlines()[-1]  # the exception's own line, behind Ray's traceback of the actor
        raise RuntimeError(f"latent_cache: its actor cannot start: {why}") from None


def _wait_for_name(timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            ray.get_actor(ACTOR_NAME, NAMESPACE)
        except ValueError:
            return
        time.sleep(0.1)
