"""`WorldSessions` over the Serve handle of the world driver."""

from __future__ import annotations

from typing import Any

import numpy as np
from ray.serve.handle import DeploymentHandle

from app.api.video_jobs import Order, Readiness
from app.api.world_sessions import ImageKind, WorldPage
from app.ingress import driver_call
from app.worlds.world_request import ChunkRequest, ChunkView, WorldParams, WorldView

ANSWER_S = 10.0
"""Longest wait for what the driver knows or reads from its table."""
WORK_S = 600.0
"""Longest wait for what gangs and decoders do, a gang that is being replaced included."""


class HandleWorlds:
    """The driver finishes what it has begun even when its caller goes away: no call here has to see to that."""

    def __init__(self, driver: DeploymentHandle) -> None:
        self._driver = driver

    async def open(self, params: WorldParams, image: np.ndarray) -> WorldView:
        """See `WorldSessions`."""
        return await self._call(WORK_S, "open", params, image)

    async def get(self, world_id: str) -> WorldView:
        """See `WorldSessions`."""
        return await self._call(ANSWER_S, "get", world_id)

    async def page(self, limit: int, after: str | None, order: Order) -> WorldPage:
        """See `WorldSessions`."""
        return await self._call(ANSWER_S, "page", limit, after, order)

    async def delete(self, world_id: str) -> None:
        """See `WorldSessions`."""
        await self._call(WORK_S, "delete", world_id)

    async def grow(self, world_id: str, request: ChunkRequest, wait_for_frames: bool) -> list[ChunkView]:
        """See `WorldSessions`."""
        return await self._call(WORK_S, "grow", world_id, request, wait_for_frames)

    async def chunk(self, world_id: str, index: int) -> ChunkView:
        """See `WorldSessions`."""
        return await self._call(ANSWER_S, "chunk", world_id, index)

    async def chunks(self, world_id: str) -> list[ChunkView]:
        """See `WorldSessions`."""
        return await self._call(ANSWER_S, "chunks", world_id)

    async def frames(self, world_id: str, index: int) -> ChunkView:
        """See `WorldSessions`."""
        return await self._call(WORK_S, "frames", world_id, index)

    async def images(self, world_id: str, index: int, kind: ImageKind) -> list[bytes]:
        """See `WorldSessions`."""
        return await self._call(WORK_S, "images", world_id, index, kind)

    async def fork(self, world_id: str, chunks: int) -> WorldView:
        """See `WorldSessions`."""
        return await self._call(WORK_S, "fork", world_id, chunks)

    async def rewind(self, world_id: str, chunks: int) -> WorldView:
        """See `WorldSessions`."""
        return await self._call(WORK_S, "rewind", world_id, chunks)

    async def park(self, world_id: str) -> WorldView:
        """See `WorldSessions`."""
        return await self._call(WORK_S, "park", world_id)

    async def resume(self, world_id: str) -> WorldView:
        """See `WorldSessions`."""
        return await self._call(WORK_S, "resume", world_id)

    async def readiness(self) -> dict[str, Readiness]:
        """See `WorldSessions`."""
        return await self._call(ANSWER_S, "readiness")

    async def _call(self, longest_s: float, method: str, *args: object) -> Any:
        return await driver_call(self._driver, longest_s, method, *args)
