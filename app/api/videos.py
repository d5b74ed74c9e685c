"""The video jobs of OpenAI's API, with cancel and plan: one JSON resource, `Video`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Query
from pydantic import BaseModel, ConfigDict
from starlette.requests import Request

from app.api.body import JSON, MULTIPART, expect_no_body, read_fields
from app.api.errors import (
    BodyTooLarge,
    InvalidBody,
    InvalidValue,
    NotReady,
    QueueFull,
    UnknownField,
    UnknownJob,
    UnknownModel,
    UnsupportedMediaType,
    WrongState,
    documented,
    shown,
)
from app.api.query import Limit
from app.api.video_jobs import Order, VideoJobs
from app.api.video_request import FORM, VideoRequest, parse_request, resolve
from app.api.video_resource import Video, video_of
from app.driver.job_state import VideoParams
from app.model_card import ModelCard

CREATION_ERRORS = (
    InvalidValue,
    UnknownField,
    InvalidBody,
    UnknownModel,
    BodyTooLarge,
    UnsupportedMediaType,
    QueueFull,
    NotReady,
)
"""What creating a job can end in, on either creating endpoint."""
TENANT_HEADER = "X-Tenant"
"""A header, not a field: a gateway that knows its users can set it, and overwrite what they send."""
TENANT = r"[A-Za-z0-9._-]{1,64}"
DEFAULT_TENANT = "default"


class VideoList(BaseModel):
    """OpenAI's page of videos."""

    model_config = ConfigDict(extra="forbid")

    object: Literal["list"] = "list"
    data: list[Video]
    first_id: str | None
    last_id: str | None
    has_more: bool


class VideoDeleted(BaseModel):
    """OpenAI's answer to a deletion."""

    model_config = ConfigDict(extra="forbid")

    id: str
    object: Literal["video.deleted"] = "video.deleted"
    deleted: Literal[True] = True


def add_routes(app: FastAPI, jobs: VideoJobs, cards: Sequence[ModelCard], max_body_bytes: int) -> None:
    """Put the endpoints on `app`."""

    @app.post(
        "/v1/videos",
        responses=documented(*CREATION_ERRORS),
        openapi_extra=request_parts(),
        operation_id="create_video",
        summary="Start a video job",
    )
    async def create(request: Request) -> Video:
        return video_of(await jobs.create(await read_params(request, cards, max_body_bytes)))

    @app.get(
        "/v1/videos",
        responses=documented(InvalidValue, UnknownField, UnknownJob, NotReady),
        operation_id="list_videos",
        summary="Jobs by creation time",
    )
    async def list_videos(
        limit: Limit = 20,
        after: Annotated[str | None, Query(description="Id of the last job of the page before.")] = None,
        order: Annotated[Order, Query(description="desc: newest first.")] = "desc",
    ) -> VideoList:
        page = await jobs.list(limit, None if after is None else known_id(after, "after"), order)
        videos = [video_of(view) for view in page.jobs]
        ends = [videos[0].id, videos[-1].id] if videos else [None, None]
        return VideoList(data=videos, first_id=ends[0], last_id=ends[1], has_more=page.has_more)

    @app.get(
        "/v1/videos/{video_id}",
        responses=documented(UnknownField, UnknownJob, NotReady),
        operation_id="get_video",
        summary="A job now",
    )
    async def get(video_id: str) -> Video:
        return video_of(await jobs.get(known_id(video_id)))

    @app.delete(
        "/v1/videos/{video_id}",
        responses=documented(UnknownField, UnknownJob, WrongState, NotReady),
        operation_id="delete_video",
        summary="Remove a final job and its files",
    )
    async def delete(video_id: str) -> VideoDeleted:
        await jobs.delete(known_id(video_id))
        return VideoDeleted(id=video_id)

    @app.post(
        "/v1/videos/{video_id}/cancel",
        responses=documented(UnknownField, InvalidBody, UnknownJob, WrongState, BodyTooLarge, NotReady),
        operation_id="cancel_video",
        summary="End a job that is not final",
    )
    async def cancel(video_id: str, request: Request) -> Video:
        await expect_no_body(request)
        return video_of(await jobs.cancel(known_id(video_id)))

    @app.get(
        "/v1/videos/{video_id}/plan",
        responses=documented(UnknownField, UnknownJob, NotReady),
        operation_id="get_video_plan",
        summary="What the gang will compute for a job",
    )
    async def plan(video_id: str) -> dict[str, Any]:
        return await jobs.plan(known_id(video_id))


async def read_params(request: Request, cards: Sequence[ModelCard], max_body_bytes: int) -> VideoParams:
    """The job a request's header and body ask for.  Raises the client errors of CREATION_ERRORS."""
    tenant = request.headers.get(TENANT_HEADER, DEFAULT_TENANT)
    if not re.fullmatch(TENANT, tenant):
        raise InvalidValue(
            f"{TENANT_HEADER}: got {shown(tenant)}, expected 1 to 64 letters, digits, '.', '_' and '-'", TENANT_HEADER
        )
    return resolve(parse_request(await read_fields(request, max_body_bytes, FORM)), cards, tenant)


def request_parts() -> dict[str, Any]:
    """OpenAPI's `requestBody` and header of the creating endpoints, which read them themselves."""
    schema = VideoRequest.model_json_schema()
    form = {**schema, "properties": {name: _without_null(value) for name, value in schema["properties"].items()}}
    tenant = {
        "name": TENANT_HEADER,
        "in": "header",
        "required": False,
        "description": "On whose behalf: latents are reused within a tenant alone.",
        "schema": {"type": "string", "pattern": f"^{TENANT}$", "default": DEFAULT_TENANT},
    }
    return {
        "parameters": [tenant],
        "requestBody": {"required": True, "content": {JSON: {"schema": schema}, MULTIPART: {"schema": form}}},
    }


def known_id(video_id: str, param: str = "video_id") -> str:
    """`video_id` when it could be one; keeps NULs and novels away from the database.  Raises UnknownJob."""
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", video_id):
        raise UnknownJob(f"{param}: no video {shown(video_id)}", param)
    return video_id


def _without_null(field: dict[str, Any]) -> dict[str, Any]:
    """A property of the JSON body as multipart text can say it: there is no null."""
    kinds = [kind for kind in field.get("anyOf", []) if kind != {"type": "null"}]
    rest = {key: value for key, value in field.items() if key not in ("anyOf", "default")}
    return field if not kinds else {**rest, **(kinds[0] if len(kinds) == 1 else {"anyOf": kinds})}
