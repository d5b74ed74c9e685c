"""Worlds over HTTP: open, grow, fork, rewind, park and resume, look, delete."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Query
from pydantic import BaseModel, ConfigDict
from starlette.requests import Request

from app.api.body import JSON, MULTIPART, expect_no_body, read_fields
from app.api.errors import (
    ApiError,
    BodyTooLarge,
    InvalidBody,
    InvalidValue,
    NotReady,
    UnknownField,
    UnknownModel,
    UnsupportedMediaType,
    documented,
    shown,
)
from app.api.query import Limit
from app.api.video_jobs import Order
from app.api.world_errors import ChunkFailed, UnknownChunk, UnknownWorld, WorldMovedOn, WorldsFull
from app.api.world_request import (
    BOUNDARY_FORM,
    CHUNK_FORM,
    FORM,
    BoundaryBody,
    ChunkBody,
    WorldBody,
    boundary,
    card_named,
    chunk_request,
    world_params,
)
from app.api.world_resource import ChunkResource, WorldResource, chunk_of, world_of
from app.api.world_sessions import WorldSessions
from app.worlds.world_card import WorldCard

FIELD_ERRORS: tuple[type[ApiError], ...] = (
    InvalidValue,
    UnknownField,
    InvalidBody,
    BodyTooLarge,
    UnsupportedMediaType,
    NotReady,
)
"""What any endpoint with a body can end in."""


class _Answer(BaseModel):
    model_config = ConfigDict(extra="forbid")


class WorldList(_Answer):
    """A page of worlds."""

    object: Literal["list"] = "list"
    data: list[WorldResource]
    first_id: str | None
    last_id: str | None
    has_more: bool


class ChunkList(_Answer):
    """Chunks in their order."""

    object: Literal["list"] = "list"
    data: list[ChunkResource]


class WorldDeleted(_Answer):
    """Answer to a deletion."""

    id: str
    object: Literal["world.deleted"] = "world.deleted"
    deleted: Literal[True] = True


def add_routes(
    app: FastAPI, worlds: WorldSessions, cards: Sequence[WorldCard], max_body_bytes: int, max_image_bytes: int
) -> None:
    """Put the endpoints on `app`.  max_image_bytes: of the file; its base64 text is a third longer."""

    @app.post(
        "/v1/worlds",
        responses=documented(*FIELD_ERRORS, UnknownModel, WorldsFull, ChunkFailed),
        openapi_extra=_body(WorldBody, files=("image",)),
        operation_id="open_world",
        summary="Open a world",
    )
    async def open_world(request: Request) -> WorldResource:
        fields = await read_fields(request, max_body_bytes + max_image_bytes * 4 // 3, FORM)
        params, image = world_params(fields, cards, max_image_bytes)
        return world_of(await worlds.open(params, image))

    @app.get(
        "/v1/worlds",
        responses=documented(InvalidValue, UnknownField, UnknownWorld, NotReady),
        operation_id="list_worlds",
        summary="Worlds by creation time",
    )
    async def list_worlds(
        limit: Limit = 20,
        after: Annotated[str | None, Query(description="Id of the last world of the page before.")] = None,
        order: Annotated[Order, Query(description="desc: newest first.")] = "desc",
    ) -> WorldList:
        page = await worlds.page(limit, None if after is None else world_id_of(after, "after"), order)
        data = [world_of(view) for view in page.worlds]
        ends = [data[0].id, data[-1].id] if data else [None, None]
        return WorldList(data=data, first_id=ends[0], last_id=ends[1], has_more=page.has_more)

    @app.get(
        "/v1/worlds/{world_id}",
        responses=documented(UnknownField, UnknownWorld, NotReady),
        operation_id="get_world",
        summary="A world now",
    )
    async def get_world(world_id: str) -> WorldResource:
        return world_of(await worlds.get(world_id_of(world_id)))

    @app.delete(
        "/v1/worlds/{world_id}",
        responses=documented(UnknownField, UnknownWorld, NotReady),
        operation_id="delete_world",
        summary="Remove a world and its files",
    )
    async def delete_world(world_id: str) -> WorldDeleted:
        await worlds.delete(world_id_of(world_id))
        return WorldDeleted(id=world_id)

    @app.post(
        "/v1/worlds/{world_id}/chunks",
        responses=documented(*FIELD_ERRORS, UnknownWorld, WorldMovedOn, WorldsFull, ChunkFailed),
        openapi_extra=_body(ChunkBody),
        operation_id="make_chunks",
        summary="Make a world's next chunks and wait for their frames",
    )
    async def make_chunks(world_id: str, request: Request) -> ChunkList:
        known = world_id_of(world_id)
        fields = await read_fields(request, max_body_bytes, CHUNK_FORM)
        card = card_named((await worlds.get(known)).world.model, cards)
        made = await worlds.grow(known, chunk_request(fields, card), True)
        return ChunkList(data=[chunk_of(view) for view in made])

    @app.get(
        "/v1/worlds/{world_id}/chunks",
        responses=documented(UnknownField, UnknownWorld, NotReady),
        operation_id="list_chunks",
        summary="A world's chunks",
    )
    async def list_chunks(world_id: str) -> ChunkList:
        return ChunkList(data=[chunk_of(view) for view in await worlds.chunks(world_id_of(world_id))])

    @app.get(
        "/v1/worlds/{world_id}/chunks/{index}",
        responses=documented(UnknownField, UnknownWorld, UnknownChunk, NotReady),
        operation_id="get_chunk",
        summary="One chunk",
    )
    async def get_chunk(world_id: str, index: str) -> ChunkResource:
        return chunk_of(await worlds.chunk(world_id_of(world_id), chunk_index(index)))

    @app.post(
        "/v1/worlds/{world_id}/fork",
        responses=documented(*FIELD_ERRORS, UnknownWorld, WorldMovedOn, WorldsFull),
        openapi_extra=_body(BoundaryBody),
        operation_id="fork_world",
        summary="A new world that begins with the first chunks of this one",
    )
    async def fork(world_id: str, request: Request) -> WorldResource:
        chunks = boundary(await read_fields(request, max_body_bytes, BOUNDARY_FORM))
        return world_of(await worlds.fork(world_id_of(world_id), chunks))

    @app.post(
        "/v1/worlds/{world_id}/rewind",
        responses=documented(*FIELD_ERRORS, UnknownWorld, WorldMovedOn),
        openapi_extra=_body(BoundaryBody),
        operation_id="rewind_world",
        summary="Drop all but the first chunks",
    )
    async def rewind(world_id: str, request: Request) -> WorldResource:
        chunks = boundary(await read_fields(request, max_body_bytes, BOUNDARY_FORM))
        return world_of(await worlds.rewind(world_id_of(world_id), chunks))

    @app.post(
        "/v1/worlds/{world_id}/park",
        responses=documented(UnknownField, InvalidBody, BodyTooLarge, UnknownWorld, NotReady),
        operation_id="park_world",
        summary="Keep only the journal",
    )
    async def park(world_id: str, request: Request) -> WorldResource:
        await expect_no_body(request)
        return world_of(await worlds.park(world_id_of(world_id)))

    @app.post(
        "/v1/worlds/{world_id}/resume",
        responses=documented(
            UnknownField, InvalidBody, BodyTooLarge, UnknownWorld, WorldMovedOn, WorldsFull, ChunkFailed, NotReady
        ),
        operation_id="resume_world",
        summary="Bring a world back before its next chunk is asked for",
    )
    async def resume(world_id: str, request: Request) -> WorldResource:
        await expect_no_body(request)
        return world_of(await worlds.resume(world_id_of(world_id)))


def world_id_of(text: str, param: str = "world_id") -> str:
    """`text` when it could be a world's id; keeps NULs and novels away from the database.  Raises UnknownWorld."""
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", text):
        raise UnknownWorld(f"{param}: no world {shown(text)}", param)
    return text


def chunk_index(text: str) -> int:
    """A chunk's number in a path.  Raises UnknownChunk."""
    if not re.fullmatch(r"0|[1-9][0-9]{0,8}", text):
        raise UnknownChunk(f"index: got {shown(text)}, expected a chunk's number, 0 first", "index")
    return int(text)


def _body(model: type[BaseModel], files: Sequence[str] = ()) -> dict[str, Any]:
    """The OpenAPI `requestBody` of an endpoint that reads its body itself."""
    schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
    schema.update(_inlined(schema))
    content: dict[str, Any] = {JSON: {"schema": schema}}
    if files:
        properties = {**schema["properties"], **{name: {"type": "string", "format": "binary"} for name in files}}
        content[MULTIPART] = {"schema": {**schema, "properties": properties}}
    return {"requestBody": {"required": True, "content": content}}


def _inlined(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema with its definitions in the places that refer to them: FastAPI does not know of these models."""
    definitions = schema.pop("$defs", {})

    def inline(value: Any) -> Any:
        if isinstance(value, list):
            return [inline(item) for item in value]
        if not isinstance(value, dict):
            return value
        if "$ref" in value:
            return inline(definitions[value["$ref"].rsplit("/", 1)[1]])
        return {name: inline(item) for name, item in value.items()}

    inlined: dict[str, Any] = inline(schema)
    return inlined
