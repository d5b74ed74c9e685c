"""The Serve replica of one rank: it joins its gang and, as rank 0, turns a call into a stream of progress."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import AsyncIterator
from typing import Any, Literal, TypedDict

import ray
from ray import serve
from safetensors.torch import load, save
from torch import Tensor

from deployments.gang.conductor import Result, Submission
from deployments.gang.gang_lost import GangLost
from deployments.gang.rank import JOIN_TIMEOUT_S, Rank, RankSpec
from deployments.gang.rendezvous import leave, meet

STOP_TIMEOUT_S = 20.0
"""Longest wait for a step in flight when the replica is told to go."""
FAREWELL_S = 1.0
"""Between the end of a broken rank and that of its process: callers still hear why."""

logger = logging.getLogger("ray.serve")


class GangEvent(TypedDict, total=False):
    """One item of a request's stream: ``accepted``, then ``step`` s (the newest of a pile), then ``result``."""

    kind: Literal["accepted", "step", "result"]
    gang: str
    done: int
    """The solver's steps done, those before a resume included."""
    latents: list[ray.ObjectRef]
    """One reference to a safetensors blob with ``latents``; in a list so that it travels as a reference."""
    ranks: list[dict[str, Any]]
    """What each rank did, as its worker reports it."""
    seconds: float
    """From the first step to the last."""


class _Stream:
    """Carries events from the conductor's thread to the event loop; unread steps give way to newer ones."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._news = asyncio.Event()
        self._done = 0
        self._end: tuple[Result, float] | BaseException | None = None

    def on_step(self, done: int) -> None:
        self._loop.call_soon_threadsafe(self._put, done, None)

    def on_result(self, result: Result, seconds: float) -> None:
        self._loop.call_soon_threadsafe(self._put, None, (result, seconds))

    def on_failure(self, error: BaseException) -> None:
        self._loop.call_soon_threadsafe(self._put, None, error)

    def _put(self, done: int | None, end: tuple[Result, float] | BaseException | None) -> None:
        self._done = self._done if done is None else done
        self._end = self._end or end
        self._news.set()

    async def __aiter__(self) -> AsyncIterator[int | tuple[Result, float]]:
        """Steps done, then the result; raises GangLost."""
        told = 0
        while True:
            await self._news.wait()
            self._news.clear()
            if self._done > told:
                told = self._done
                yield told
            match self._end:
                case None:
                    continue
                case BaseException() as error:
                    raise GangLost(f"the gang broke: {error!r}") from error
                case result:
                    yield result
                    return


class StageReplica:
    """One rank.  Constructed by Serve in every process of a gang; ready when the whole gang is."""

    def __init__(self, spec: RankSpec) -> None:
        gang = serve.get_replica_context().gang_context
        if gang is None:
            raise RuntimeError("StageReplica: deploy it with gang_scheduling_config, a gang of one included")
        self._gang_id, self._rank_number = gang.gang_id, gang.rank
        self._stopped = False
        store = meet(gang.gang_id, gang.rank, gang.world_size, JOIN_TIMEOUT_S)
        self._rank = Rank(spec, gang.rank, gang.world_size, store)
        self._rank.wait_ready()
        if gang.rank == 0:
            leave(gang.gang_id)
        logger.info("rank %d of gang %s: process %d is ready", gang.rank, gang.gang_id, os.getpid())
        threading.Thread(target=self._end_with_rank, name="end-with-rank", daemon=True).start()

    def record_replica_metadata(self) -> dict[str, Any]:
        """What the router and operators see of this replica."""
        node = ray.get_runtime_context().get_node_id()
        return {"gang": self._gang_id, "rank": self._rank_number, "node": node, "pid": os.getpid()}

    async def check_health(self) -> None:
        """Raises once the device thread has ended, for Serve to restart the gang if the process does not end itself."""
        if not self._rank.alive and not self._stopped:
            raise RuntimeError(f"rank {self._rank_number} of gang {self._gang_id} has stopped: {self._rank.failure!r}")

    async def generate(
        self, key: str, spec: dict[str, Any], blobs: list[ray.ObjectRef | bytes], start: int, steps: int, digest: int
    ) -> AsyncIterator[GangEvent]:
        """Rank 0: run one request; closing the stream cancels it within a step.

        key: names the request; a second call with the key of a running one takes over its stream.
        spec, start, steps, digest: as in `Submission`.  blobs: safetensors, by value or by reference, merged into its
        tensors.
        """
        tensors: dict[str, Tensor] = {}
        for blob in blobs:
            tensors |= load(blob if isinstance(blob, bytes) else await blob)
        stream = _Stream()
        conductor = self._rank.conductor
        conductor.submit(Submission(key, spec, tensors, start, steps, digest, stream))
        ended = False
        try:
            yield GangEvent(kind="accepted", gang=self._gang_id)
            async for item in stream:
                if isinstance(item, int):
                    yield GangEvent(kind="step", done=item)
                else:
                    result, seconds = item
                    ended = True
                    if result.saved is not None:
                        await asyncio.wrap_future(result.saved)
                    logger.info("%s: denoised in %.3f s", key, seconds)
                    blob = await asyncio.to_thread(save, {"latents": result.latents})
                    yield GangEvent(kind="result", latents=[ray.put(blob)], ranks=result.ranks, seconds=seconds)
        except GangLost:
            ended = True
            raise
        finally:
            if not ended:
                conductor.cancel(key, stream)

    def _end_with_rank(self) -> None:
        """A broken rank is of no use, and the sooner its process ends the sooner Serve starts another gang: its health
        checks would need three periods, in which the router goes on sending requests here."""
        self._rank.join()
        if self._rank.failure is not None and not self._stopped:
            logger.error("rank %d of gang %s broke", self._rank_number, self._gang_id, exc_info=self._rank.failure)
            time.sleep(FAREWELL_S)
            os._exit(1)

    def __del__(self) -> None:
        """Serve's way to say that the replica shall go."""
        if getattr(self, "_rank", None) is not None:
            self._stopped = True
            self._rank.stop(STOP_TIMEOUT_S)
