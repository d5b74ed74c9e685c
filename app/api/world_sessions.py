"""What the HTTP surface asks of the world driver.  `app.ingress` gives it over a Serve handle, tests by a fake."""

from __future__ import annotations

from typing import Literal, NamedTuple, Protocol

import numpy as np

from app.api.video_jobs import Order, Readiness
from app.worlds.world_request import ChunkRequest, ChunkView, WorldParams, WorldView

ImageKind = Literal["jpeg", "png"]


class WorldPage(NamedTuple):
    """A slice of the table of worlds."""

    worlds: list[WorldView]
    has_more: bool
    """Whether worlds follow the last one in this order."""


class WorldSessions(Protocol):
    """The worlds of all served models.  Every method may raise an `app.api.errors.ApiError`; `NotReady` any of them."""

    async def open(self, params: WorldParams, image: np.ndarray) -> WorldView:
        """A new world; once this returns it survives every restart.  image: RGB [H, W, 3] uint8.  Raises WorldsFull."""
        ...

    async def get(self, world_id: str) -> WorldView:
        """The world now.  Raises UnknownWorld."""
        ...

    async def page(self, limit: int, after: str | None, order: Order) -> WorldPage:
        """At most `limit` worlds by creation, those behind world `after`.  Raises UnknownWorld for `after`."""
        ...

    async def delete(self, world_id: str) -> None:
        """Remove a world and its files.  Raises UnknownWorld."""
        ...

    async def grow(self, world_id: str, request: ChunkRequest, wait_for_frames: bool) -> list[ChunkView]:
        """Make chunks; they are durable once this returns, their frames with `wait_for_frames`.

        Raises UnknownWorld, WorldMovedOn, WorldsFull, ChunkFailed.
        """
        ...

    async def chunk(self, world_id: str, index: int) -> ChunkView:
        """One chunk.  Raises UnknownWorld, UnknownChunk."""
        ...

    async def chunks(self, world_id: str) -> list[ChunkView]:
        """All chunks.  Raises UnknownWorld."""
        ...

    async def frames(self, world_id: str, index: int) -> ChunkView:
        """One chunk, once its frames are stored.  Raises UnknownWorld, UnknownChunk, ChunkFailed."""
        ...

    async def images(self, world_id: str, index: int, kind: ImageKind) -> list[bytes]:
        """A chunk's frames, each an image file.  Raises UnknownWorld, UnknownChunk, ChunkFailed."""
        ...

    async def fork(self, world_id: str, chunks: int) -> WorldView:
        """A new world that begins with the first `chunks` chunks.  Raises UnknownWorld, WorldMovedOn, WorldsFull."""
        ...

    async def rewind(self, world_id: str, chunks: int) -> WorldView:
        """Drop all but the first `chunks` chunks.  Raises UnknownWorld, WorldMovedOn."""
        ...

    async def park(self, world_id: str) -> WorldView:
        """Let everything but the journal go.  Raises UnknownWorld."""
        ...

    async def resume(self, world_id: str) -> WorldView:
        """Bring a world's window to its end before a chunk is asked for.  Raises UnknownWorld, ChunkFailed."""
        ...

    async def readiness(self) -> dict[str, Readiness]:
        """Readiness by model name."""
        ...
