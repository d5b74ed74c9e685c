"""Worlds and chunks as the HTTP surface shows them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from app.worlds.world_request import ChunkView, WorldView
from app.worlds.world_state import Parent, Source, Timings
from deployments.lingbot.controls import ChunkControls


class _Resource(BaseModel):
    model_config = ConfigDict(extra="forbid")


class WorldResource(_Resource):
    """A world."""

    id: str
    object: Literal["world"] = "world"
    created_at: float = Field(description="Unix seconds.")
    used_at: float = Field(description="Unix seconds of the last change.")
    model: str
    prompt: str = Field(description="Cleaned; in force until a chunk changes it.")
    seed: int
    size: str
    fps: int
    cache: Literal["auto", "off"] = Field(description="off: neither takes chunks of other worlds nor gives.")
    root: str = Field(description="Names everything but the controls that decides the world's pixels.")
    parent: Parent | None = Field(description="The world this one was forked from, and at which chunk.")
    chunks: int
    frames: int
    fast_forward_k: int = Field(description="Chunks of its path that came from the cache.")
    busy: bool
    parked: bool = Field(description="Only its journal is kept.")


class ChunkResource(_Resource):
    """A chunk, with its receipt."""

    object: Literal["world.chunk"] = "world.chunk"
    world: str
    index: int = Field(description="0 first.")
    key: str = Field(description="Names the chunk and its whole past; equal keys are equal frames.")
    frames: int
    prompt: str | None = Field(description="The prompt that came into force with it; null: the one before.")
    source: Source
    fast_forward_k: int = Field(description="Chunks of the path up to this one that came from the cache.")
    restored: int | None = Field(description="The window was restored after so many chunks first.")
    replayed: int = Field(description="So many earlier chunks were replayed first.")
    gang: str | None
    timings: Timings


def world_of(view: WorldView) -> WorldResource:
    """The resource."""
    world = view.world
    return WorldResource(
        id=world.id,
        created_at=world.created_at,
        used_at=view.used_at,
        model=world.model,
        prompt=world.prompt,
        seed=world.seed,
        size=f"{world.width}x{world.height}",
        fps=world.fps,
        cache="auto" if world.shared else "off",
        root=world.root,
        parent=world.parent,
        chunks=view.chunks,
        frames=view.frames,
        fast_forward_k=view.fast_forward_k,
        busy=view.busy,
        parked=view.parked,
    )


def chunk_of(view: ChunkView) -> ChunkResource:
    """The resource."""
    chunk = view.chunk
    return ChunkResource(
        world=view.world,
        index=view.index,
        key=chunk.key,
        frames=chunk.frames,
        prompt=ChunkControls.from_canonical(chunk.controls.encode()).prompt,
        source=chunk.source,
        fast_forward_k=chunk.fast_forward_k,
        restored=chunk.restored,
        replayed=chunk.replayed,
        gang=chunk.gang,
        timings=chunk.timings,
    )


def plain(view: ChunkView) -> dict[str, Any]:
    """The resource as JSON values."""
    return chunk_of(view).model_dump(mode="json")
