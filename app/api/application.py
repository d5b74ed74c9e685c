"""The FastAPI application: all endpoints, one error envelope, a truthful OpenAPI schema.  Knows nothing of Ray."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fastapi import Depends, FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.api import health, models, video_content, video_events, video_sync, videos
from app.api.errors import ApiError, InternalError, InvalidValue, MethodNotAllowed, UnknownPath, response_of, shown
from app.api.query import known_query
from app.api.validation import error_of
from app.api.video_content import ResultFiles
from app.api.video_jobs import VideoJobs
from app.api.world_surface import WorldSurface
from app.config import Http
from app.model_card import ModelCard

if TYPE_CHECKING:
    from app.api.latent_cache import LatentCacheCalls

logger = logging.getLogger(__name__)


def make_app(
    jobs: VideoJobs,
    cards: Sequence[ModelCard],
    storage: ResultFiles,
    http: Http,
    heartbeat_s: float = video_events.HEARTBEAT_S,
    latent_cache: LatentCacheCalls | None = None,
    worlds: WorldSurface | None = None,
) -> FastAPI:
    """The HTTP surface over `jobs`.

    cards: the served video models.  storage: where finished jobs' files are.  heartbeat_s: longest silence of
    an event stream.  latent_cache: None on a server without one, which then has no endpoints for it;
    worlds: likewise.
    """
    app = FastAPI(
        title="worldstage",
        version="1",
        dependencies=[Depends(known_query)],
        docs_url=None,  # the pages load their scripts from elsewhere; /openapi.json is the schema itself
        redoc_url=None,
        redirect_slashes=False,  # a path is right or unknown; a redirect would lose a POST's body
    )
    world_cards = () if worlds is None else worlds.cards
    health.add_routes(app, [jobs] if worlds is None else [jobs, worlds.sessions], [*cards, *world_cards])
    models.add_routes(app, [*cards, *world_cards])
    video_sync.add_routes(app, jobs, cards, storage, http.max_body_bytes)
    videos.add_routes(app, jobs, cards, http.max_body_bytes)
    video_content.add_routes(app, jobs, storage)
    video_events.add_routes(app, jobs, heartbeat_s)
    if worlds is not None:
        worlds.add_routes(app, http)
    if latent_cache is not None:
        from app.api import latent_cache as endpoints  # here: without it nothing of the cache is imported

        endpoints.add_routes(app, latent_cache)
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(RequestValidationError, _invalid_parameter)
    app.add_exception_handler(HTTPException, _no_such_route)
    app.add_middleware(UnexpectedErrors)
    schema = _schema(app)
    app.openapi = lambda: schema  # type: ignore[method-assign]
    return app


class UnexpectedErrors:
    """ASGI middleware: an exception nobody foresaw becomes InternalError with an id, and its traceback a log entry."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request; after the first byte of an answer all that is left is to break the connection."""
        if scope["type"] != "http":  # a WebSocket tells of its errors itself
            await self._app(scope, receive, send)
            return
        started = False

        async def watched(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except ClientDisconnect:
            logger.info("%s %s: the client left while sending", scope.get("method"), scope.get("path"))
        except Exception:
            error_id = uuid.uuid4().hex
            logger.exception("error %s in %s %s", error_id, scope.get("method"), scope.get("path"))
            if started:
                raise
            error = InternalError(f"unexpected error, logged as {error_id}")
            await response_of(error, {"X-Error-Id": error_id})(scope, receive, send)


async def _api_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return response_of(error)


async def _invalid_parameter(_: Request, error: Exception) -> Response:
    """FastAPI's findings in the path, query or headers; their first location item names which."""
    assert isinstance(error, RequestValidationError)
    return response_of(error_of([{**finding, "loc": finding["loc"][1:]} for finding in error.errors()]))


async def _no_such_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = shown(request.url.path)
    if error.status_code == 405:
        # Starlette's own Allow header names the methods of the first route of this path only.
        routes = [route for route in request.app.routes if isinstance(route, Route)]
        here = [route for route in routes if route.path == request.url.path]  # /v1/videos/sync is not /v1/videos/{id}
        here = here or [route for route in routes if route.matches(request.scope)[0] is not Match.NONE]
        allowed = ", ".join(sorted({method for route in here for method in route.methods or ()}))
        return response_of(
            MethodNotAllowed(f"{request.method} {path}: method not allowed; allowed: {allowed}"), {"Allow": allowed}
        )
    if error.status_code == 404:
        return response_of(UnknownPath(f"no endpoint {path}; GET /openapi.json lists them"))
    return response_of(InvalidValue(str(error.detail)))


def _schema(app: FastAPI) -> dict[str, Any]:
    """FastAPI's schema without the 422 answers it assumes: this API answers 400 in its own envelope."""
    schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
    for operations in schema["paths"].values():
        for operation in operations.values():
            operation["responses"].pop("422", None)
    for name in ("HTTPValidationError", "ValidationError"):
        schema["components"]["schemas"].pop(name, None)
    return schema
