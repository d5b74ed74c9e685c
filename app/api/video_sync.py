"""`POST /v1/videos/sync`: create a job, wait, answer with the mp4.  A client that hangs up cancels its job."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from app.api.errors import ApiError, JobFailed, NoSuchFile, NotReady, WrongState, documented
from app.api.video_content import FILES, ResultFiles, file_response
from app.api.video_jobs import VideoJobs
from app.api.videos import CREATION_ERRORS, read_params, request_parts
from app.driver.job_state import Job, JobState, JobView, VideoParams
from app.model_card import ModelCard

logger = logging.getLogger(__name__)

CLIENT_CLOSED = 499
"""nginx's status for a client that left; nobody receives it, but logs show it."""
HEADERS = {
    "X-Job-Id": "Id of the job; it stays listed like any other.",
    "X-Seed": "The seed used.",
    "X-Model": "The model used.",
    "X-Fingerprint": "SHA-256 of the model's weights.",
    "X-Cache": "What the latent cache gave: `hit` and its level, or why there was no hit.",
}


def add_routes(
    app: FastAPI, jobs: VideoJobs, cards: Sequence[ModelCard], files: ResultFiles, max_body_bytes: int
) -> None:
    """Put the endpoint on `app`."""
    headers = {name: {"description": text, "schema": {"type": "string"}} for name, text in HEADERS.items()}
    media = {FILES["video"].media_type: {"schema": {"type": "string", "format": "binary"}}}

    @app.post(
        "/v1/videos/sync",
        response_class=Response,
        responses={
            **documented(*CREATION_ERRORS, NoSuchFile, WrongState, JobFailed),
            200: {"content": media, "description": "The video.", "headers": headers},
        },
        openapi_extra=request_parts(),
        operation_id="create_video_sync",
        summary="Make a video while the client waits",
    )
    async def sync(request: Request) -> Response:
        job = await _run(jobs, await read_params(request, cards, max_body_bytes), request)
        if job is None:
            return Response(status_code=CLIENT_CLOSED)
        if job.state is JobState.CANCELLED:
            raise WrongState(f"video {job.id}: cancelled by another request")
        if job.state is not JobState.COMPLETED:
            why = "unknown reason" if job.error is None else f"{job.error.code}: {job.error.message}"
            raise JobFailed(f"video {job.id}: {job.state}: {why}")
        values = (job.id, str(job.params.seed), job.params.model, job.fingerprint, _reuse(job))
        return await file_response(files, job, "video", None, dict(zip(HEADERS, values, strict=True)))


def _reuse(job: Job) -> str:
    report = job.cache
    if report is None:
        return "none"
    return f"hit; level={report.level}" if report.decision == "hit" else f"{report.decision}; reason={report.reason}"


async def _run(jobs: VideoJobs, params: VideoParams, request: Request) -> Job | None:
    """The final job, or None when the client left first; its job is then cancelled."""
    creating = asyncio.ensure_future(jobs.create(params))
    gone = asyncio.ensure_future(_disconnected(request))
    finished: asyncio.Future[JobView] | None = None
    try:
        job_id = (await asyncio.shield(creating)).job.id
        finished = asyncio.ensure_future(_through_restarts(lambda: jobs.wait(job_id)))
        await asyncio.wait({finished, gone}, return_when=asyncio.FIRST_COMPLETED)
        return finished.result().job if finished.done() else None
    finally:
        # Reached with an answer, by a closed connection, or by a server that cancels this task because of one: then
        # the job may not even have its id yet.
        gone.cancel()
        # Serve cancels the calls that a request has made before the request itself: `finished` may be cancelled now.
        if finished is None or not finished.done() or finished.cancelled():
            if finished is not None:
                finished.cancel()
            await asyncio.shield(asyncio.ensure_future(_cancel(jobs, creating)))


async def _cancel(jobs: VideoJobs, creating: asyncio.Future[JobView]) -> None:
    try:
        job_id = (await creating).job.id
        await _through_restarts(lambda: jobs.cancel(job_id))
    except ApiError as error:  # refused at creation, or final in the meantime: nothing is left to cancel
        logger.info("sync: no job to cancel: %s", error)


async def _through_restarts(call: Callable[[], Awaitable[JobView]]) -> JobView:
    """The result of `call`, repeated while the driver restarts: an accepted job outlives it."""
    while True:
        try:
            return await call()
        except NotReady as error:
            await asyncio.sleep(error.retry_after_s or 1.0)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
