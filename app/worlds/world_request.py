"""What the HTTP surface hands to the world driver: checked, complete, and with every key under one name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from app.worlds.world_state import Chunk, World
from deployments.lingbot.controls import ChunkControls, Keys, Poses, key_frames


class _Request(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class WorldParams(_Request):
    """A world to be opened; its image goes with it as an array."""

    model: str
    prompt: str
    seed: int
    width: int
    height: int
    shared: bool


class Hold(_Request):
    """Keys held down for whole chunks."""

    kind: Literal["hold"] = "hold"
    keys: str
    """Letters of `controls.KEYS`; empty: the camera rests."""
    chunks: int = Field(ge=1)


class Moves(_Request):
    """Keys held down one after the other; what is left of the last chunk the camera rests."""

    kind: Literal["moves"] = "moves"
    moves: tuple[tuple[str, int], ...]
    """Letters, and video frames (1 or more)."""


class PoseGrid(_Request):
    """Camera poses of whole chunks, as in `controls.Poses`."""

    kind: Literal["poses"] = "poses"
    grid: tuple[tuple[int, ...], ...]


Camera = Annotated[Hold | Moves | PoseGrid, Field(discriminator="kind")]


class ChunkRequest(_Request):
    """Chunks to be made at the end of a world."""

    camera: Camera
    prompt: str | None = None
    """Cleaned; in force from the first of the chunks on."""
    after: int | None = None
    """Chunks the world has before them; makes the request safe to repeat."""


class WorldView(_Request):
    """A world now."""

    world: World
    chunks: int
    frames: int
    fast_forward_k: int
    """Of its last chunk; 0 without one."""
    used_at: float
    busy: bool
    parked: bool
    """No replica is known to hold any of its state: only the journal is there."""


class ChunkView(_Request):
    """A chunk of a world."""

    world: str
    index: int
    chunk: Chunk
    width: int
    height: int
    fps: int
    file: str
    """Where its frames are stored once they have been decoded."""


def chunk_controls(request: ChunkRequest, first: int, chunk: int) -> list[ChunkControls]:
    """The controls of consecutive chunks, of which `first` is the number of the first; chunk: latent frames of each."""
    cameras = _cameras(request.camera, first, chunk)
    return [ChunkControls(camera, request.prompt if n == 0 else None) for n, camera in enumerate(cameras)]


def _cameras(camera: Hold | Moves | PoseGrid, first: int, chunk: int) -> Sequence[Keys | Poses]:
    match camera:
        case Hold(keys=keys, chunks=chunks):
            return [Keys((frozenset(keys),) * key_frames(n, chunk)) for n in range(first, first + chunks)]
        case PoseGrid(grid=grid):
            return [Poses(grid[n : n + chunk]) for n in range(0, len(grid), chunk)]
    held = [frozenset(keys) for keys, frames in camera.moves for _ in range(frames)]
    cameras: list[Keys] = []
    while held:
        size = key_frames(first + len(cameras), chunk)
        now, held = held[:size], held[size:]
        cameras.append(Keys(tuple(now + [frozenset()] * (size - len(now)))))
    return cameras
