"""`GET /v1/videos/{id}/content`: result files, whole or in part (RFC 9110 byte ranges, one range a request).

    variant                file         content type
    video                  video.mp4    video/mp4
    spritesheet or sheet   sheet.png    image/png                  only when the request had outputs: sheet
    frames                 frames.npz   application/octet-stream   only when the request had outputs: frames

`spritesheet` is OpenAI's name of the sheet.  OpenAI's `thumbnail` is refused: no such file is made.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from typing import Annotated, BinaryIO, Literal, NamedTuple, Protocol

from anyio import to_thread
from fastapi import FastAPI, Header, Query
from starlette.responses import Response, StreamingResponse

from app.api.errors import (
    InvalidValue,
    NoSuchFile,
    NotReady,
    RangeNotSatisfiable,
    UnknownField,
    UnknownJob,
    WrongState,
    documented,
    response_of,
)
from app.api.video_jobs import VideoJobs
from app.api.videos import known_id
from app.driver.job_state import Job, JobState

CHUNK_BYTES = 1 << 18
RETRY_AFTER_S = 5.0
"""For a client that meets a storage which is away."""
Variant = Literal["video", "spritesheet", "sheet", "frames"]


class ResultFiles(Protocol):
    """The reading half of `deployments.storage.Storage`.  Keys are `<job id>/<file>`; both raise OSError when away."""

    def open_read(self, key: str) -> BinaryIO:
        """A seekable file.  Raises FileNotFoundError."""
        ...

    def size(self, key: str) -> int:
        """Bytes.  Raises FileNotFoundError."""
        ...


class ResultFile(NamedTuple):
    """A kind of result file."""

    name: str
    media_type: str


FILES: dict[Variant, ResultFile] = {
    "video": ResultFile("video.mp4", "video/mp4"),
    "spritesheet": ResultFile("sheet.png", "image/png"),
    "sheet": ResultFile("sheet.png", "image/png"),
    "frames": ResultFile("frames.npz", "application/octet-stream"),
}


def add_routes(app: FastAPI, jobs: VideoJobs, files: ResultFiles) -> None:
    """Put the endpoint on `app`."""

    binary = {"schema": {"type": "string", "format": "binary"}}
    content = {kind.media_type: binary for kind in FILES.values()}

    @app.get(
        "/v1/videos/{video_id}/content",
        response_class=Response,
        responses={
            **documented(InvalidValue, UnknownField, UnknownJob, NoSuchFile, WrongState, RangeNotSatisfiable, NotReady),
            200: {"content": content, "description": "The file."},
            206: {"content": content, "description": "The bytes asked for by Range."},
            304: {"description": "Unchanged since the ETag in If-None-Match."},
        },
        operation_id="download_video_content",
        summary="Download a result file",
    )
    async def download(
        video_id: str,
        variant: Annotated[Variant, Query(description="Which file.")] = "video",
        byte_range: Annotated[str | None, Header(alias="range", description="Such as bytes=0-1023.")] = None,
        if_range: Annotated[str | None, Header(description="Honour Range only for this ETag.")] = None,
        if_none_match: Annotated[str | None, Header(description="Answer 304 for this ETag.")] = None,
    ) -> Response:
        job = (await jobs.get(known_id(video_id))).job
        if job.state is not JobState.COMPLETED:
            raise WrongState(f"video {job.id}: state is {job.state}, files exist once it is completed")
        etag = f'"{job.id}-{FILES[variant].name}"'  # a completed job's files never change
        if if_none_match == etag:
            return Response(status_code=304, headers={"ETag": etag})
        wanted = byte_range if if_range in (None, etag) else None
        return await file_response(files, job, variant, wanted, {"ETag": etag})


async def file_response(
    files: ResultFiles, job: Job, variant: Variant, byte_range: str | None, headers: dict[str, str]
) -> Response:
    """A result file of a completed job, streamed; `byte_range`, a Range header, makes it 206, or 416 behind the end.

    Raises NoSuchFile, NotReady.
    """
    kind = FILES[variant]
    if kind.name not in job.files:
        raise NoSuchFile(
            f"variant: video {job.id} has no {kind.name}, it has {', '.join(sorted(job.files))}; "
            f"other files are made when the request names them in outputs",
            "variant",
        )
    key = f"{job.id}/{kind.name}"
    try:
        size = await to_thread.run_sync(files.size, key)
    except FileNotFoundError:
        raise NoSuchFile(f"variant: {kind.name} of video {job.id} is gone from the storage", "variant") from None
    except OSError as error:
        raise NotReady("the result storage cannot be read", retry_after_s=RETRY_AFTER_S) from error
    part = _part(byte_range, size)
    if part is None:
        behind = RangeNotSatisfiable(f"Range: got {byte_range}, the file has {size} bytes", "Range")
        return response_of(behind, {"Content-Range": f"bytes */{size}"})
    length = part.stop - part.start
    sent = {
        **headers,
        "Accept-Ranges": "bytes",
        "Content-Length": str(length),
        "Content-Disposition": f'attachment; filename="{job.id}-{kind.name}"',
    }
    if byte_range is not None and length < size:
        sent["Content-Range"] = f"bytes {part.start}-{part.stop - 1}/{size}"
    return StreamingResponse(
        _chunks(files, key, part), 206 if "Content-Range" in sent else 200, sent, media_type=kind.media_type
    )


def _part(header: str | None, size: int) -> range | None:
    """The bytes a Range header selects; the whole file where RFC 9110 section 14.2 says to ignore it; None: none."""
    match = re.fullmatch(r"bytes=(\d{0,18})-(\d{0,18})", header or "", re.ASCII)
    first, last = match.groups() if match else ("", "")
    if not first and not last:  # absent, another unit, several ranges or nonsense
        return range(size)
    if not first:
        part = range(max(0, size - int(last)), size)
    elif last and int(last) < int(first):
        return range(size)
    else:
        part = range(int(first), min(size, int(last) + 1) if last else size)
    return part if len(part) else None


async def _chunks(files: ResultFiles, key: str, part: range) -> AsyncIterator[bytes]:
    source = await to_thread.run_sync(files.open_read, key)
    try:
        await to_thread.run_sync(source.seek, part.start)
        left = len(part)
        while left and (chunk := await to_thread.run_sync(source.read, min(CHUNK_BYTES, left))):
            left -= len(chunk)
            yield chunk
    finally:
        source.close()
