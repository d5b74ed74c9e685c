"""Frames of worlds: of one chunk, or of a whole path in one file.

variant    content type
video      video/mp4
frames     application/octet-stream     npz with `frames` [F, H, W, 3] uint8 RGB and `fps`
sheet      image/png                    at most 8 frames side by side
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Protocol

import numpy as np
from anyio import to_thread
from fastapi import FastAPI, Query
from starlette.responses import Response

from app.api.errors import InvalidValue, NotReady, UnknownField, documented
from app.api.world_errors import ChunkFailed, UnknownChunk, UnknownWorld
from app.api.world_sessions import WorldSessions
from app.api.worlds import chunk_index, world_id_of
from app.worlds.world_request import ChunkView
from deployments.video_file import frames_npz, sheet, video_mp4

Variant = Literal["video", "frames", "sheet"]
MEDIA_TYPES: dict[Variant, str] = {
    "video": "video/mp4",
    "frames": "application/octet-stream",
    "sheet": "image/png",
}
ENDINGS: dict[Variant, str] = {"video": "mp4", "frames": "npz", "sheet": "png"}
MAX_PIXELS = 2**30
"""Of all frames of one file together: 3 GiB while it is made."""
RETRY_AFTER_S = 5.0


class FrameFiles(Protocol):
    """The reading half of `deployments.storage.Storage`; raises OSError when away."""

    def read_bytes(self, key: str) -> bytes:
        """A whole file.  Raises FileNotFoundError."""
        ...


def add_routes(app: FastAPI, worlds: WorldSessions, files: FrameFiles) -> None:
    """Put the endpoints on `app`."""

    binary = {"schema": {"type": "string", "format": "binary"}}
    ok: dict[int | str, dict[str, Any]] = {
        200: {"content": dict.fromkeys(MEDIA_TYPES.values(), binary), "description": "The file."}
    }

    @app.get(
        "/v1/worlds/{world_id}/chunks/{index}/content",
        response_class=Response,
        responses={**documented(InvalidValue, UnknownField, UnknownWorld, UnknownChunk, ChunkFailed, NotReady), **ok},
        operation_id="download_chunk_content",
        summary="Frames of one chunk",
    )
    async def chunk_content(
        world_id: str, index: str, variant: Annotated[Variant, Query(description="Which file.")] = "video"
    ) -> Response:
        view = await worlds.frames(world_id_of(world_id), chunk_index(index))
        return await _answer(files, [view], variant, f"{world_id}-{index}")

    @app.get(
        "/v1/worlds/{world_id}/content",
        response_class=Response,
        responses={**documented(InvalidValue, UnknownField, UnknownWorld, UnknownChunk, ChunkFailed, NotReady), **ok},
        operation_id="download_world_content",
        summary="Frames of a whole world",
    )
    async def world_content(
        world_id: str, variant: Annotated[Variant, Query(description="Which file.")] = "video"
    ) -> Response:
        known = world_id_of(world_id)
        views = await worlds.chunks(known)
        if not views:
            raise UnknownChunk(f"world {known} has no chunk yet")
        pixels = sum(view.chunk.frames * view.width * view.height for view in views)
        if pixels > MAX_PIXELS:
            raise InvalidValue(
                f"world {known}: {len(views)} chunks are {pixels} pixels, at most {MAX_PIXELS} fit into one file; "
                "download the chunks one by one"
            )
        views = [await worlds.frames(known, view.index) for view in views]
        return await _answer(files, views, variant, known)


async def _answer(files: FrameFiles, views: Sequence[ChunkView], variant: Variant, name: str) -> Response:
    try:
        data = await to_thread.run_sync(_file, files, views, variant)
    except FileNotFoundError as error:
        raise NotReady("a chunk's frames are being made again", None, RETRY_AFTER_S) from error
    except OSError as error:
        raise NotReady("the result storage cannot be read", None, RETRY_AFTER_S) from error
    headers = {
        "Content-Disposition": f'attachment; filename="{name}.{ENDINGS[variant]}"',
        # A chunk's key stands for its frames: a rewound world has other chunks under the same numbers.
        "ETag": f'"{views[-1].chunk.key}-{len(views)}-{variant}"',
    }
    return Response(data, headers=headers, media_type=MEDIA_TYPES[variant])


def _file(files: FrameFiles, views: Sequence[ChunkView], variant: Variant) -> bytes:
    stored = [files.read_bytes(view.file) for view in views]
    if variant == "frames" and len(stored) == 1:
        return stored[0]
    frames = np.concatenate([np.load(io.BytesIO(data))["frames"] for data in stored])
    match variant:
        case "video":
            return video_mp4(frames, views[0].fps)
        case "frames":
            return frames_npz(frames, views[0].fps)
        case "sheet":
            return sheet(frames)
