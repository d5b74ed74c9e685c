"""Whether a model can work: only a request that ran through all of it shows that."""

from __future__ import annotations

import asyncio
import logging

from app.api.video_jobs import Readiness
from app.driver.background import Background
from app.driver.failure import cause_of
from app.driver.progress import Pace
from app.driver.video_attempt import ModelServices
from app.driver.warm_up import WarmUp, warm_up
from deployments.storage import Storage

RETRY_PAUSE_S = 1.0
"""Serve notices a death and routes around it within this order of time."""

logger = logging.getLogger("ray.serve")


class ModelReadiness:
    """Runs warm-ups until every gang has finished one, and again after a loss."""

    def __init__(self, services: ModelServices, storage: Storage, pace: Pace, background: Background) -> None:
        self._services, self._storage, self._pace, self._background = services, storage, pace, background
        self._reason = "warming up: no request has run through every rank yet"
        self._ready = asyncio.Event()
        background.spawn(self._warm_up())

    def state(self) -> Readiness:
        """Now."""
        return Readiness(ready=not self._reason, reason=self._reason)

    async def proven(self) -> None:
        """Until the model can work; after a loss, until one of its gangs certainly can."""
        await asyncio.sleep(RETRY_PAUSE_S)
        await self._ready.wait()

    def worker_lost(self) -> None:
        """Not ready until warm-ups succeed again; with several gangs the others go on meanwhile."""
        if self._ready.is_set() and self._services.card.topology.gangs == 1:
            self._ready.clear()
            self._reason = "a worker was lost: waiting for another one"
            self._background.spawn(self._warm_up())

    async def _warm_up(self) -> None:
        gangs: set[str] = set()
        card = self._services.card
        wanted = card.topology.gangs
        while len(gangs) < wanted:
            # At once, so that the router spreads them over the gangs.
            tries = (warm_up(self._services, self._storage) for _ in range(wanted - len(gangs)))
            for result in await asyncio.gather(*tries, return_exceptions=True):
                if isinstance(result, WarmUp):
                    gangs.add(result.gang)
                    self._pace.observe(result.params, result.pace)
                elif isinstance(result, Exception):
                    logger.warning("warm-up of model %s: %r", card.name, result)
                    self._reason = f"warming up; the last try ended with {cause_of(result)!r}"[:500]
                    await asyncio.sleep(RETRY_PAUSE_S)
                else:
                    raise result
        self._reason = ""
        self._ready.set()
        logger.info("model %s is ready", card.name)
