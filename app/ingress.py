"""The HTTP front of the cluster: `app.api` on a Serve ingress deployment, its jobs behind the driver's handle.

Serve builds the ASGI app late: `serve.ingress()(VideoIngress)` calls `__serve_build_asgi_app__` in the replica after
the constructor (Ray 2.60, python/ray/serve/api.py `ingress`), so all state arrives through the constructor.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from fastapi import FastAPI
from ray.exceptions import RayActorError, RayTaskError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, ReplicaUnavailableError
from ray.serve.handle import DeploymentHandle

from app.api.application import make_app
from app.api.errors import ApiError, NotReady, QueueFull
from app.api.video_jobs import JobPage, Order, Readiness
from app.api.world_surface import WorldSurface
from app.config import Http
from app.driver.job_state import JobView, VideoParams
from app.model_card import ModelCard
from app.worlds.world_card import WorldCard
from deployments.storage import Storage

Result = TypeVar("Result")

RETRY_AFTER_S = 2.0
"""About the time in which Serve replaces a lost driver."""
ANSWER_S = 10.0
"""Longest wait for a driver that answers from memory; Serve itself would wait for ever for one that is not up."""


class VideoIngress:
    """Ingress deployment.  driver: handle of a deployment with the methods of `VideoJobs`; cards: the served models;
    latent_cache: whether there is one to show; worlds: the world driver, the world models and the longest image."""

    def __init__(
        self,
        driver: DeploymentHandle,
        cards: Sequence[ModelCard],
        storage: Storage,
        http: Http,
        latent_cache: bool = False,
        worlds: tuple[DeploymentHandle, Sequence[WorldCard], int] | None = None,
    ) -> None:
        self._jobs = HandleJobs(driver)
        self._cards, self._storage, self._http = tuple(cards), storage, http
        self._latent_cache = latent_cache
        self._worlds: WorldSurface | None = None
        if worlds is not None:
            from app.world_ingress import HandleWorlds  # here: without worlds nothing of them is imported

            self._worlds = WorldSurface(HandleWorlds(worlds[0]), worlds[1], storage, worlds[2])

    def __serve_build_asgi_app__(self) -> FastAPI:
        cache = None
        if self._latent_cache:
            from cache_actors.latent_cache_actor import LatentCacheClient  # here: off means absent

            cache = LatentCacheClient(ANSWER_S)
        return make_app(self._jobs, self._cards, self._storage, self._http, latent_cache=cache, worlds=self._worlds)


class HandleJobs:
    """`VideoJobs` over a Serve handle.

    `create` and `cancel` run to their end even when the HTTP request that caused them is cancelled: Serve would pass
    the cancel on to the driver, and nobody would know whether a job exists.
    """

    def __init__(self, driver: DeploymentHandle, answer_s: float = ANSWER_S) -> None:
        self._driver, self._answer_s = driver, answer_s

    async def create(self, params: VideoParams) -> JobView:
        """See `VideoJobs`."""
        return await _to_the_end(self._call("create", params))

    async def get(self, job_id: str) -> JobView:
        """See `VideoJobs`."""
        return await self._call("get", job_id)

    async def list(self, limit: int, after: str | None, order: Order) -> JobPage:
        """See `VideoJobs`."""
        return await self._call("list", limit, after, order)

    async def cancel(self, job_id: str) -> JobView:
        """See `VideoJobs`."""
        return await _to_the_end(self._call("cancel", job_id))

    async def delete(self, job_id: str) -> None:
        """See `VideoJobs`."""
        await self._call("delete", job_id)

    async def plan(self, job_id: str) -> dict[str, Any]:
        """See `VideoJobs`."""
        return await self._call("plan", job_id)

    async def wait(self, job_id: str) -> JobView:
        """See `VideoJobs`."""
        with _driver_errors():
            return await self._driver.wait.remote(job_id)

    async def readiness(self) -> dict[str, Readiness]:
        """See `VideoJobs`."""
        return await self._call("readiness")

    async def events(self, job_id: str) -> AsyncIterator[JobView]:
        """See `VideoJobs`."""
        stream = self._driver.options(stream=True).events.remote(job_id)
        limit: float | None = self._answer_s  # for the present state; changes come when they come
        try:
            while True:
                with _driver_errors():
                    async with asyncio.timeout(limit):
                        view = await anext(stream, None)
                if view is None:
                    return
                yield view
                limit = None
        finally:
            stream.cancel()

    async def _call(self, method: str, *args: object) -> Any:
        return await driver_call(self._driver, self._answer_s, method, *args)


async def driver_call(driver: DeploymentHandle, longest_s: float, method: str, *args: object) -> Any:
    """A method of a driver.  Raises its own ApiError, or the one for a driver that is away, swamped or silent."""
    with _driver_errors():
        async with asyncio.timeout(longest_s):
            return await getattr(driver, method).remote(*args)


@contextmanager
def _driver_errors() -> Iterator[None]:
    """The driver's own ApiError out of Ray's wrapping; a driver that is away or swamped as the ApiError for that."""
    try:
        yield
    except RayTaskError as error:
        if isinstance(error.cause, ApiError):
            raise error.cause from None
        raise
    except BackPressureError as error:
        raise QueueFull("the driver has too many requests waiting", retry_after_s=RETRY_AFTER_S) from error
    except (RayActorError, DeploymentUnavailableError, ReplicaUnavailableError, TimeoutError) as error:
        raise NotReady("the driver is starting or restarting", retry_after_s=RETRY_AFTER_S) from error


async def _to_the_end(call: Coroutine[Any, Any, Result]) -> Result:
    """Run `call` where cancelling the caller does not reach it: in its own task, and outside the context by which
    Serve finds the calls of a request it cancels."""
    return await asyncio.shield(asyncio.create_task(call, context=contextvars.Context()))
