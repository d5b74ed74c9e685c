"""`GET /v1/models` and `GET /v1/models/{id}`: OpenAI's model object, with the facts requests are checked against."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict, Field

from app.api.errors import UnknownField, UnknownModel, documented, shown
from app.config import Topology, VideoDefaults, VideoLimits, WorldLimits, WorldStream, WorldTopology
from app.model_card import ModelCard
from app.worlds.world_card import WorldCard


class Model(BaseModel):
    """A served model."""

    model_config = ConfigDict(extra="forbid")

    id: str
    object: Literal["model"] = "model"
    created: int = Field(description="Unix seconds at which this application was built.")
    owned_by: Literal["worldstage"] = "worldstage"
    kind: Literal["video"] = "video"
    fingerprint: str = Field(description="SHA-256 of the weights.")
    dtype: str
    experts: int = Field(description="2: high-noise and low-noise transformer, each with its guidance scale.")
    topology: Topology
    defaults: VideoDefaults = Field(description="What a request gets for the fields it does not send.")
    flow_shift: float = Field(description="Effective default of flow_shift.")
    limits: VideoLimits


class WorldModel(BaseModel):
    """A served world model."""

    model_config = ConfigDict(extra="forbid")

    id: str
    object: Literal["model"] = "model"
    created: int = Field(description="Unix seconds at which this application was built.")
    owned_by: Literal["worldstage"] = "worldstage"
    kind: Literal["world"] = "world"
    fingerprint: str = Field(description="SHA-256 of the transformer's files.")
    dtype: str
    topology: WorldTopology
    stream: WorldStream
    fps: int
    default_pixels: int = Field(description="Area of a world whose request names no size.")
    limits: WorldLimits


class ModelList(BaseModel):
    """OpenAI's list of models."""

    model_config = ConfigDict(extra="forbid")

    object: Literal["list"] = "list"
    data: list[Model | WorldModel]


def add_routes(app: FastAPI, cards: Sequence[ModelCard | WorldCard]) -> None:
    """Put the endpoints on `app`."""
    models: dict[str, Model | WorldModel] = {
        card.name: _model(card) if isinstance(card, ModelCard) else _world_model(card) for card in cards
    }

    @app.get("/v1/models", responses=documented(UnknownField), operation_id="list_models", summary="Served models")
    async def list_models() -> ModelList:
        return ModelList(data=list(models.values()))

    @app.get(
        "/v1/models/{model}",
        responses=documented(UnknownField, UnknownModel),
        operation_id="get_model",
        summary="One served model",
    )
    async def get_model(model: str) -> Model | WorldModel:
        if model not in models:
            raise UnknownModel(f"model: got {shown(model)}, expected one of {shown(list(models))}", "model")
        return models[model]


def _model(card: ModelCard) -> Model:
    return Model(
        id=card.name,
        created=card.created,
        fingerprint=card.fingerprint,
        dtype=card.dtype,
        experts=card.experts,
        topology=card.topology,
        defaults=card.defaults,
        flow_shift=card.flow_shift,
        limits=card.limits,
    )


def _world_model(card: WorldCard) -> WorldModel:
    return WorldModel(
        id=card.name,
        created=card.created,
        fingerprint=card.fingerprint,
        dtype=card.dtype,
        topology=card.topology,
        stream=card.stream,
        fps=card.fps,
        default_pixels=card.default_pixels,
        limits=card.limits,
    )
