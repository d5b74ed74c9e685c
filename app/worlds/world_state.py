"""What is durable of a world beside its chunks' latents.

A world is a path of chunks.  It grows at its end (chunk), loses its end (rewind), or begins as another's beginning
(fork); what happened to be in a GPU's memory is no part of it.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

Source = Literal["generated", "cache"]


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Parent(_Record):
    """Where a fork comes from."""

    world: str
    chunks: int
    """The fork began with so many of its chunks."""


class World(_Record):
    """Fixed once the world is open."""

    id: str
    model: str
    created_at: float
    """Unix seconds."""
    prompt: str
    """Cleaned; in force until a chunk changes it."""
    seed: int
    width: int
    height: int
    """Pixels."""
    fps: int
    shared: bool
    """Whether its chunks are looked for in the cache and put there."""
    image: str
    """SHA-256 (hex) of the image's pixels."""
    root: str
    """Root key (hex)."""
    material: str
    """What the root key digests (ASCII)."""
    parent: Parent | None = None


class Timings(_Record):
    """Seconds."""

    waited: float
    """For a place on a gang and for the chunk before."""
    model: float
    """On the gang, or in the cache; storing included."""


class Chunk(_Record):
    """One chunk of a world: its receipt."""

    key: str
    """Node key (hex): names the chunk and its whole past."""
    controls: str
    """Canonical (ASCII)."""
    frames: int
    """Video frames."""
    source: Source
    fast_forward_k: int
    """Chunks of the world's path, this one included, that came from the cache instead of being computed."""
    restored: int | None
    """Before it the gang's window was restored from keys and values after so many chunks; None: it was not."""
    replayed: int
    """Before it so many earlier chunks were replayed, by their clean pass alone."""
    gang: str | None
    """Who made it; None: the cache."""
    timings: Timings
