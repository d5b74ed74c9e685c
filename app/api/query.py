"""Query parameters, as strict as bodies: unknown or repeated ones are refused, integers are plain digits."""

from __future__ import annotations

import re
from typing import Annotated

from fastapi import Query
from fastapi.routing import APIRoute
from pydantic import BeforeValidator
from starlette.requests import Request

from app.api.errors import UnknownField
from app.api.validation import unknown_field


def _digits(value: object) -> object:
    # Without this pydantic reads "5.0", " 5" and "٥" as 5.
    if isinstance(value, str) and not re.fullmatch(r"-?[0-9]{1,18}", value, re.ASCII):
        raise ValueError("expected an integer")
    return value


Limit = Annotated[int, BeforeValidator(_digits), Query(ge=1, le=100, description="Most jobs in one answer.")]


async def known_query(request: Request) -> None:
    """Dependency of every endpoint.  Raises UnknownField for a parameter it does not have or that comes twice."""
    route = request.scope["route"]
    known = [field.alias for field in route.dependant.query_params] if isinstance(route, APIRoute) else []
    names = [name for name, _ in request.query_params.multi_items()]
    for name in names:
        if name not in known:
            raise UnknownField(unknown_field(name, known), name)
        if names.count(name) > 1:
            raise UnknownField(f"{name}: sent more than once; send it once", name)
