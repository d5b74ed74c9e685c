"""`GET /health`: the process answers.  `GET /ready`: every model has done a warm-up request and can work now."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict

from app.api.errors import NotReady, UnknownField, documented
from app.api.video_jobs import Readiness

RETRY_AFTER_S = 2.0
"""Between two looks of a client that waits for the start."""


class Health(BaseModel):
    """The process is alive; says nothing of models."""

    model_config = ConfigDict(extra="forbid")

    status: Literal["ok"] = "ok"


class Ready(BaseModel):
    """Every model can work now."""

    model_config = ConfigDict(extra="forbid")

    status: Literal["ready"] = "ready"
    models: list[str]


class Named(Protocol):
    """A served model's facts."""

    @property
    def name(self) -> str: ...


class Driver(Protocol):
    """Who knows which of its models can work."""

    async def readiness(self) -> dict[str, Readiness]:
        """Readiness by model name."""
        ...


def add_routes(app: FastAPI, drivers: Sequence[Driver], cards: Sequence[Named]) -> None:
    """Put the endpoints on `app`.  drivers: each answers for some of the models."""
    names = [card.name for card in cards]

    @app.get("/health", responses=documented(UnknownField), operation_id="health", summary="Is the process alive?")
    async def health() -> Health:
        return Health()

    @app.get(
        "/ready", responses=documented(UnknownField, NotReady), operation_id="ready", summary="Can every model work?"
    )
    async def ready() -> Ready:
        states = {name: state for driver in drivers for name, state in (await driver.readiness()).items()}
        missing = Readiness(ready=False, reason="not started")
        waiting = [
            f"{name}: {states.get(name, missing)['reason']}" for name in names if not states.get(name, missing)["ready"]
        ]
        if waiting:
            raise NotReady("; ".join(waiting), retry_after_s=RETRY_AFTER_S)
        return Ready(models=names)
