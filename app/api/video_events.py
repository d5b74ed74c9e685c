"""`GET /v1/videos/{id}/events`: a job's changes as server-sent events.

    event: video     data: the Video object, at once and after every change; the stream ends behind a final one
    event: error     data: the error envelope; the stream ends, and a new connection starts with the present state
    : heartbeat      a comment whenever nothing was sent for HEARTBEAT_S

Every event holds the whole state, so none needs an id and a reconnect loses nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator

from fastapi import FastAPI
from starlette.responses import StreamingResponse

from app.api.errors import ApiError, NotReady, UnknownField, UnknownJob, body_of, documented
from app.api.video_jobs import VideoJobs
from app.api.video_resource import video_of
from app.api.videos import known_id
from app.driver.job_state import JobView

HEARTBEAT_S = 15.0
"""Below the idle limits of common proxies (nginx: 60 s)."""
EVENT_STREAM = "text/event-stream"
EVENT_SCHEMA = {
    "type": "object",
    "properties": {
        "event": {"enum": ["video", "error"]},
        "data": {"type": "string", "contentMediaType": "application/json"},
    },
    "required": ["event", "data"],
}
"""One event."""


def add_routes(app: FastAPI, jobs: VideoJobs, heartbeat_s: float) -> None:
    """Put the endpoint on `app`."""

    @app.get(
        "/v1/videos/{video_id}/events",
        response_class=StreamingResponse,
        responses={
            **documented(UnknownField, UnknownJob, NotReady),
            200: {"content": {EVENT_STREAM: {"schema": EVENT_SCHEMA}}, "description": "Server-sent events."},
        },
        operation_id="stream_video_events",
        summary="A job's changes as they happen",
    )
    async def events(video_id: str) -> StreamingResponse:
        views = jobs.events(known_id(video_id))
        first = await anext(views)  # here, so that an unknown job is a 404 and not a broken stream
        return StreamingResponse(
            event_stream(first, views, heartbeat_s),
            media_type=EVENT_STREAM,
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
        )


async def event_stream(first: JobView, views: AsyncIterator[JobView], heartbeat_s: float) -> AsyncIterator[str]:
    """Events as text; closes `views` when the client leaves."""
    yield _event("video", video_of(first).model_dump_json())
    following = asyncio.ensure_future(anext(views, None))
    try:
        while True:
            await asyncio.wait({following}, timeout=heartbeat_s)  # a wait that runs out must not cancel anext
            if not following.done():
                yield ": heartbeat\n\n"
                continue
            try:
                view = following.result()
            except ApiError as error:
                yield _event("error", json.dumps(body_of(error)))
                return
            if view is None:
                return
            yield _event("video", video_of(view).model_dump_json())
            following = asyncio.ensure_future(anext(views, None))
    finally:
        following.cancel()
        with contextlib.suppress(asyncio.CancelledError, ApiError):
            await following
        close = getattr(views, "aclose", None)
        if close is not None:
            await close()


def _event(name: str, data: str) -> str:
    return f"event: {name}\ndata: {data}\n\n"
