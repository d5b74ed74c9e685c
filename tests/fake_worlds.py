"""`WorldSessions` without a driver: worlds in a dict, chunks of one gray level each."""

from __future__ import annotations

import base64
from dataclasses import dataclass, field
from typing import Any

import imageio.v3 as iio
import numpy as np

from app.api.errors import ApiError
from app.api.video_jobs import Order, Readiness
from app.api.world_errors import UnknownChunk, UnknownWorld, WorldMovedOn
from app.api.world_sessions import ImageKind, WorldPage
from app.api.world_surface import WorldSurface
from app.config import WorldLimits, WorldStream, WorldTopology
from app.worlds.live_world import LiveWorld
from app.worlds.world_card import WorldCard
from app.worlds.world_request import ChunkRequest, ChunkView, WorldParams, WorldView, chunk_controls
from app.worlds.world_state import Chunk, Parent, Timings, World
from app.worlds.world_store import StoredWorld
from deployments.lingbot.stream_config import pixel_frames
from deployments.video_file import frames_npz

CARD = WorldCard(
    name="small",
    created=1_700_000_000,
    fingerprint="f" * 64,
    dtype="float32",
    topology=WorldTopology(),
    stream=WorldStream(chunk=2, window=-1),
    fps=16,
    default_pixels=32 * 48,
    limits=WorldLimits(max_pixels=64 * 64, max_chunks=8, max_request_chunks=3, max_prompt_chars=50),
)

PICTURE = np.random.default_rng(0).integers(0, 256, (32, 48, 3), dtype=np.uint8)
PNG = iio.imwrite("<bytes>", PICTURE, extension=".png")
BODY: dict[str, Any] = {"prompt": "a  room", "image": base64.b64encode(PNG).decode(), "seed": 2**62}
"""Of a request for a world."""


@dataclass
class FakeWorlds:
    """`files` holds the frames; `error` is raised by the next `grow`."""

    worlds: dict[str, LiveWorld] = field(default_factory=dict)
    images_seen: list[np.ndarray] = field(default_factory=list)
    stored: dict[str, bytes] = field(default_factory=dict)
    error: ApiError | None = None

    async def open(self, params: WorldParams, image: np.ndarray) -> WorldView:
        self.images_seen.append(image)
        number = len(self.worlds) + 1
        world = World(
            id=f"world_{number}",
            created_at=1e9 + number,
            fps=16,
            image="a" * 64,
            root=f"{number:064x}",
            material="{}",
            **params.model_dump(),
        )
        self.worlds[world.id] = LiveWorld(StoredWorld(world, [], 0, world.created_at))
        return self.worlds[world.id].view()

    async def get(self, world_id: str) -> WorldView:
        return self._find(world_id).view()

    async def page(self, limit: int, after: str | None, order: Order) -> WorldPage:
        ids = list(self.worlds) if order == "asc" else list(reversed(self.worlds))
        if after is not None:
            ids = ids[ids.index(self._find(after, "after").id) + 1 :]
        return WorldPage([self.worlds[name].view() for name in ids[:limit]], len(ids) > limit)

    async def delete(self, world_id: str) -> None:
        del self.worlds[self._find(world_id).id]

    async def grow(self, world_id: str, request: ChunkRequest, wait_for_frames: bool) -> list[ChunkView]:
        live = self._find(world_id)
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        first = len(live.stored.chunks)
        if request.after not in (None, first):
            raise WorldMovedOn(f"after: got {request.after}, the world has {first} chunks", "after")
        for controls in chunk_controls(request, first, CARD.stream.chunk):
            index = len(live.stored.chunks)
            chunk = Chunk(
                key=live.next_key(controls).hex(),
                controls=controls.canonical().decode(),
                frames=pixel_frames(index, CARD.stream.chunk),
                source="generated",
                fast_forward_k=0,
                restored=None,
                replayed=0,
                gang="g",
                timings=Timings(waited=0, model=0.5),
            )
            live.stored.chunks.append(chunk)
            live.controls.append(controls)
            view = live.chunk_view(index)
            gray = np.full((chunk.frames, view.height, view.width, 3), 20 * index, np.uint8)
            self.stored[view.file] = frames_npz(gray, 16)
        return [live.chunk_view(index) for index in range(first, len(live.stored.chunks))]

    async def chunk(self, world_id: str, index: int) -> ChunkView:
        live = self._find(world_id)
        if index >= len(live.stored.chunks):
            raise UnknownChunk(f"chunk: got {index}", "chunk")
        return live.chunk_view(index)

    async def chunks(self, world_id: str) -> list[ChunkView]:
        live = self._find(world_id)
        return [live.chunk_view(index) for index in range(len(live.stored.chunks))]

    async def frames(self, world_id: str, index: int) -> ChunkView:
        return await self.chunk(world_id, index)

    async def images(self, world_id: str, index: int, kind: ImageKind) -> list[bytes]:
        view = await self.chunk(world_id, index)
        return [f"{kind} {index} {frame}".encode() for frame in range(view.chunk.frames)]

    async def fork(self, world_id: str, chunks: int) -> WorldView:
        live = self._find(world_id)
        self._check(live, chunks)
        parent = Parent(world=world_id, chunks=chunks)
        world = live.stored.world.model_copy(update={"id": f"world_{len(self.worlds) + 1}", "parent": parent})
        self.worlds[world.id] = LiveWorld(StoredWorld(world, live.stored.chunks[:chunks], 0, 0.0))
        return self.worlds[world.id].view()

    async def rewind(self, world_id: str, chunks: int) -> WorldView:
        live = self._find(world_id)
        self._check(live, chunks)
        del live.stored.chunks[chunks:], live.controls[chunks:]
        return live.view()

    async def park(self, world_id: str) -> WorldView:
        return self._find(world_id).view()

    async def resume(self, world_id: str) -> WorldView:
        return self._find(world_id).view()

    async def readiness(self) -> dict[str, Readiness]:
        return {CARD.name: Readiness(ready=True, reason="")}

    def read_bytes(self, key: str) -> bytes:
        """`FrameFiles`."""
        if key not in self.stored:
            raise FileNotFoundError(key)
        return self.stored[key]

    def _find(self, world_id: str, param: str = "world_id") -> LiveWorld:
        if world_id not in self.worlds:
            raise UnknownWorld(f"no world {world_id}", param)
        return self.worlds[world_id]

    @staticmethod
    def _check(live: LiveWorld, chunks: int) -> None:
        if chunks > len(live.stored.chunks):
            raise WorldMovedOn(f"chunks: got {chunks}, the world has {len(live.stored.chunks)}", "chunks")


def surface(worlds: FakeWorlds | None = None) -> WorldSurface:
    """An application's worlds, of one model."""
    worlds = worlds or FakeWorlds()
    return WorldSurface(worlds, [CARD], worlds, 1 << 20)
