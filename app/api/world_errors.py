"""Errors that only worlds have; `docs/contracts/worlds.md` lists the table."""

from __future__ import annotations

from app.api.errors import ApiError


class UnknownWorld(ApiError):
    """No world has this id: it never existed or was deleted."""

    status, type, code = 404, "invalid_request_error", "world_not_found"


class UnknownChunk(ApiError):
    """The world has no chunk of this number."""

    status, type, code = 404, "invalid_request_error", "chunk_not_found"


class WorldMovedOn(ApiError):
    """The world is not where the request says it is, or cannot grow any further."""

    status, type, code = 409, "conflict_error", "world_moved_on"
    retryable = False


class WorldsFull(ApiError):
    """As many worlds exist, or requests wait, as the configuration allows."""

    status, type, code = 429, "rate_limit_error", "worlds_full"


class ChunkFailed(ApiError):
    """A chunk could not be made; the world is where it was."""

    status, type, code = 500, "server_error", "chunk_failed"
    retryable = False
