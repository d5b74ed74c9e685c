"""`WS /v1/worlds/{world_id}/stream`: keys in, frames out.

client   {"type": "chunk", ...}     the fields of `ChunkBody`: make these chunks; several may wait in line
client   {"type": "hold", "keys"}   keys held from now on; the world goes on chunk after chunk while it plays
client   {"type": "play"}           begin or go on playing         {"type": "pause"}  stop after the chunk at hand
server   {"type": "chunk", ...}     a chunk's receipt, then as many binary messages as `images` says, a frame each
server   {"type": "error", "error"} the error envelope; the connection goes on
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal, get_args

import anyio
from fastapi import FastAPI
from starlette.routing import WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from app.api.body import read_json
from app.api.errors import ApiError, InternalError, InvalidBody, InvalidValue, UnknownField, body_of, shown
from app.api.validation import unknown_field
from app.api.world_request import card_named, chunk_request
from app.api.world_resource import plain
from app.api.world_sessions import ImageKind, WorldSessions
from app.api.worlds import world_id_of
from app.worlds.world_card import WorldCard
from app.worlds.world_request import ChunkRequest, ChunkView

PATH = "/v1/worlds/{world_id}/stream"
MAX_WAITING = 16
"""Chunk requests of one connection that are not begun; more are refused."""
AHEAD = 2
"""Chunks that may be made before the frames of the first of them have been taken by the client."""
POLICY_VIOLATION = 1008
"""Close code for a connection that cannot be served."""

INTERNAL_ERROR = 1011
"""Close code for a fault of ours."""

logger = logging.getLogger(__name__)

Frames = Literal["jpeg", "png", "none"]


def add_routes(app: FastAPI, worlds: WorldSessions, cards: Sequence[WorldCard]) -> None:
    """Put the endpoint on `app`."""

    async def stream(websocket: WebSocket) -> None:
        await websocket.accept()
        try:
            frames = _frames(websocket)
            world_id = world_id_of(websocket.path_params["world_id"])
            card = card_named((await worlds.get(world_id)).world.model, cards)
        except ApiError as error:
            await websocket.send_json({"type": "error", **body_of(error)})
            await websocket.close(POLICY_VIOLATION, error.code)
            return
        try:
            await _Stream(websocket, worlds, world_id, card, frames).run()
        except Exception:
            error_id = uuid.uuid4().hex
            logger.exception("error %s in the stream of %s", error_id, world_id)
            with suppress(RuntimeError, WebSocketDisconnect):  # gone already
                fault = InternalError(f"unexpected error, logged as {error_id}")
                await websocket.send_json({"type": "error", **body_of(fault)})
                await websocket.close(INTERNAL_ERROR)

    app.router.routes.append(WebSocketRoute(PATH, stream))


def _frames(websocket: WebSocket) -> Frames:
    known = ("frames",)
    for name in websocket.query_params:
        if name not in known:
            raise UnknownField(unknown_field(name, known), name)
    value = websocket.query_params.get("frames", "jpeg")
    for kind in get_args(Frames):
        if value == kind:
            return kind
    raise InvalidValue(f"frames: got {shown(value)}, expected one of {', '.join(get_args(Frames))}", "frames")


class _Stream:
    """One connection.  Chunks are made by one task and sent by another, so that a chunk's frames are decoded and on
    their way while the next one is made."""

    def __init__(
        self, websocket: WebSocket, worlds: WorldSessions, world_id: str, card: WorldCard, frames: Frames
    ) -> None:
        self._websocket, self._worlds, self._world_id, self._card = websocket, worlds, world_id, card
        self._frames = frames
        self._wanted: asyncio.Queue[ChunkRequest] = asyncio.Queue()
        self._made: asyncio.Queue[tuple[ChunkView, float] | ApiError] = asyncio.Queue(AHEAD - 1)
        self._held: list[str] = []
        self._playing = asyncio.Event()
        self._news = asyncio.Event()

    async def run(self) -> None:
        """Until either side ends it."""
        async with anyio.create_task_group() as parts:

            async def until_its_end(part: Callable[[], Awaitable[None]]) -> None:
                await part()
                parts.cancel_scope.cancel()

            for part in (self._listen, self._make, self._send):
                parts.start_soon(until_its_end, part)

    async def _listen(self) -> None:
        while True:
            message = await self._websocket.receive()
            if message["type"] == "websocket.disconnect":
                return
            try:
                self._take(message)
            except ApiError as error:
                await self._made.put(error)

    def _take(self, message: Mapping[str, Any]) -> None:
        text = message.get("text")
        if text is None:
            raise InvalidBody("message: got bytes, expected JSON text")
        fields = read_json(text.encode("utf-8", "surrogatepass"))
        kind = fields.pop("type", None)
        match kind:
            case "chunk":
                if self._wanted.qsize() >= MAX_WAITING:
                    raise InvalidValue(f"chunk: {MAX_WAITING} requests of this connection wait already", "type")
                self._wanted.put_nowait(chunk_request(fields, self._card))
            case "hold":
                if set(fields) != {"keys"}:
                    raise InvalidValue('hold: expected the field keys alone, such as {"type": "hold", "keys": ["w"]}')
                chunk_request(fields, self._card)  # checks the names
                self._held = fields["keys"]
            case "play" | "pause":
                if fields:
                    raise UnknownField(unknown_field(next(iter(fields)), ()), next(iter(fields)))
                (self._playing.set if kind == "play" else self._playing.clear)()
            case _:
                raise InvalidValue(f"type: got {shown(kind)}, expected one of chunk, hold, play, pause", "type")
        self._news.set()

    async def _make(self) -> None:
        due = 0.0
        while True:
            request = await self._next(due)
            begun = time.monotonic()
            try:
                views = await self._worlds.grow(self._world_id, request, False)
            except ApiError as error:
                self._playing.clear()
                await self._made.put(error)
                continue
            for view in views:
                await self._made.put((view, begun))
            # Played no faster than it is watched: one chunk ahead, so that there is always one to show.
            due = max(due, begun) + sum(view.chunk.frames for view in views) / self._card.fps

    async def _next(self, due: float) -> ChunkRequest:
        """What to make next: what was asked for, or while playing what the held keys say, no earlier than `due`."""
        while True:
            if not self._wanted.empty():
                return self._wanted.get_nowait()
            wait = None
            if self._playing.is_set():
                wait = due - self._card.stream.chunk * 4 / self._card.fps - time.monotonic()
                if wait <= 0:
                    return chunk_request({"keys": self._held}, self._card)
            self._news.clear()
            try:
                async with asyncio.timeout(wait):
                    await self._news.wait()
            except TimeoutError:
                continue

    async def _send(self) -> None:
        while True:
            item = await self._made.get()
            try:
                if isinstance(item, ApiError):
                    raise item
                await self._send_chunk(*item)
            except ApiError as error:
                await self._websocket.send_json({"type": "error", **body_of(error)})
            except WebSocketDisconnect:
                return

    async def _send_chunk(self, view: ChunkView, begun: float) -> None:
        images: list[bytes] = []
        if self._frames != "none":
            kind: ImageKind = self._frames
            images = await self._worlds.images(self._world_id, view.index, kind)
        receipt = plain(view)
        timings = {**receipt["timings"], "total": time.monotonic() - begun}
        header = {"type": "chunk", **receipt, "timings": timings, "images": len(images), "format": self._frames}
        await self._websocket.send_text(json.dumps(header))
        for image in images:
            await self._websocket.send_bytes(image)
