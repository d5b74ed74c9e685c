"""Every error the HTTP surface can answer with: one class a cause, and OpenAI's envelope around all of them.

    {"error": {"message": "...", "type": "invalid_request_error", "param": "num_frames", "code": "invalid_value"}}

The driver raises the same classes in its own process, so each can be pickled.  `docs/contracts/videos.md` lists the
table; a test compares the page with this module.
"""

from __future__ import annotations

import json
import math
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict
from starlette.responses import JSONResponse, Response

ErrorType = Literal[
    "invalid_request_error", "conflict_error", "rate_limit_error", "server_error", "service_unavailable_error"
]
SHOWN_CHARS = 80
"""Longest piece of a caller's value that an error repeats."""


class ApiError(Exception):
    """An answer that is not a success.

    message: for the caller, in words: the field, the value, what is allowed, the cure.  param: the field to blame, or
    None.  retry_after_s: seconds after which the same request may succeed, or None; sent as Retry-After, rounded up.
    """

    status: ClassVar[int]
    type: ClassVar[ErrorType]
    code: ClassVar[str]
    retryable: ClassVar[bool] = True
    """False tells the openai client not to repeat by itself what it would repeat for this status."""

    def __init__(self, message: str, param: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message, param, retry_after_s)  # all of it in args: that is what pickle rebuilds from
        self.message, self.param, self.retry_after_s = message, param, retry_after_s

    def __str__(self) -> str:
        return self.message


class InvalidValue(ApiError):
    """A field, query parameter or header has a value that is not allowed."""

    status, type, code = 400, "invalid_request_error", "invalid_value"


class UnknownField(ApiError):
    """A field or query parameter that does not exist here, or one that was sent twice."""

    status, type, code = 400, "invalid_request_error", "unknown_field"


class InvalidBody(ApiError):
    """The body cannot be read: bad JSON, bad multipart, bad UTF-8."""

    status, type, code = 400, "invalid_request_error", "invalid_body"


class UnknownPath(ApiError):
    """No endpoint has this path."""

    status, type, code = 404, "invalid_request_error", "unknown_path"


class UnknownJob(ApiError):
    """No job has this id: it never existed or was deleted."""

    status, type, code = 404, "invalid_request_error", "video_not_found"


class UnknownModel(ApiError):
    """No served model has this name."""

    status, type, code = 404, "invalid_request_error", "model_not_found"


class UnknownEntry(ApiError):
    """The latent cache has no such entry: it never existed, expired or was evicted."""

    status, type, code = 404, "invalid_request_error", "entry_not_found"


class NoSuchFile(ApiError):
    """The job has no such result file."""

    status, type, code = 404, "invalid_request_error", "file_not_found"


class MethodNotAllowed(ApiError):
    """The path exists, but not with this method."""

    status, type, code = 405, "invalid_request_error", "method_not_allowed"


class WrongState(ApiError):
    """The job's state does not allow this."""

    status, type, code = 409, "conflict_error", "wrong_state"
    retryable = False


class BodyTooLarge(ApiError):
    """The body is longer than `http.max_body_bytes`."""

    status, type, code = 413, "invalid_request_error", "body_too_large"


class UnsupportedMediaType(ApiError):
    """The Content-Type of the body is neither JSON nor multipart."""

    status, type, code = 415, "invalid_request_error", "unsupported_media_type"


class RangeNotSatisfiable(ApiError):
    """The Range header asks for bytes behind the end of the file."""

    status, type, code = 416, "invalid_request_error", "range_not_satisfiable"


class QueueFull(ApiError):
    """As many jobs wait as `jobs.max_queued` allows."""

    status, type, code = 429, "rate_limit_error", "queue_full"


class JobFailed(ApiError):
    """The job of `POST /v1/videos/sync` ended as failed or cancelled; the job itself says why."""

    status, type, code = 500, "server_error", "job_failed"
    retryable = False


class InternalError(ApiError):
    """A fault of ours; the log has the details under the id in the message."""

    status, type, code = 500, "server_error", "internal_error"


class NotReady(ApiError):
    """The model or the driver is starting or restarting."""

    status, type, code = 503, "service_unavailable_error", "not_ready"


class ErrorDetail(BaseModel):
    """OpenAI's error object."""

    model_config = ConfigDict(extra="forbid")

    message: str
    type: ErrorType
    param: str | None
    code: str


class ErrorBody(BaseModel):
    """OpenAI's error envelope."""

    model_config = ConfigDict(extra="forbid")

    error: ErrorDetail


def body_of(error: ApiError) -> dict[str, object]:
    """The envelope as JSON values.  Lone surrogates, which no UTF-8 text can hold, come out escaped."""
    param = None if error.param is None else _encodable(error.param[:SHOWN_CHARS])
    detail = ErrorDetail(message=_encodable(error.message), type=error.type, param=param, code=error.code)
    return ErrorBody(error=detail).model_dump()


def response_of(error: ApiError, headers: dict[str, str] | None = None) -> Response:
    """The HTTP answer: status, envelope, and Retry-After where the error knows it."""
    sent = dict(headers or {})
    if error.retry_after_s is not None:
        sent["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))
    if not error.retryable:
        sent["X-Should-Retry"] = "false"
    return JSONResponse(body_of(error), status_code=error.status, headers=sent)


def shown(value: object) -> str:
    """A caller's value for an error message: JSON, ASCII, at most `SHOWN_CHARS` characters."""
    try:
        text = json.dumps(value, default=str)
    except RecursionError:  # a value that could just be read can be too deep to write
        text = f"a deeply nested {type(value).__name__}"
    return text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]}... ({len(text)} characters)"


def _encodable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def documented(*errors: type[ApiError]) -> dict[int | str, dict[str, Any]]:
    """FastAPI's `responses` for an endpoint that can end in these errors, and in InternalError like every other."""
    answers: dict[int | str, dict[str, Any]] = {}
    ends: tuple[type[ApiError], ...] = (*errors, InternalError)
    for error in ends:
        shared = answers.setdefault(error.status, {"model": ErrorBody, "description": ""})
        shared["description"] = ", ".join(filter(None, (shared["description"], error.code)))
        if error.status in (429, 503):
            shared["headers"] = {"Retry-After": {"description": "Seconds.", "schema": {"type": "integer"}}}
    return answers
