"""A world that this driver has in its hands: its durable record, and what need not be read again for the next chunk."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

from torch import Tensor

from app.worlds.journal_files import frames_file
from app.worlds.world_request import ChunkView, WorldView
from app.worlds.world_store import StoredWorld
from cache_actors.keys import Key, node_key
from deployments.lingbot.controls import ChunkControls
from deployments.lingbot.session import World as GangWorld


@dataclass
class Material:
    """What a gang must be given with a request; dropped when the world is parked."""

    world: GangWorld
    texts: dict[str, Tensor] = field(default_factory=dict)
    """Embeddings [n, text_dim] by prompt."""


class LiveWorld:
    """Belongs to one event loop.  `turn` is held by whoever changes the path; waiters get it in order."""

    def __init__(self, stored: StoredWorld) -> None:
        self.stored = stored
        self.turn = asyncio.Lock()
        self.decoding = asyncio.Lock()
        """Chunks are decoded one after the other, in their order."""
        self.sharing = asyncio.Lock()
        """Chunks go to the cache in their order."""
        self.decodes: dict[str, asyncio.Task[None]] = {}
        """By node key: decodes that are not over."""
        self.material: Material | None = None
        self.gang = ""
        """Who had the last request; empty where nobody is known to hold anything."""
        self.deleted = False
        self.users = 0
        """Requests at work on the world."""
        self.used = time.monotonic()
        self.controls = [ChunkControls.from_canonical(c.controls.encode()) for c in stored.chunks]

    @property
    def id(self) -> str:
        """The world's id."""
        return self.stored.world.id

    @property
    def root(self) -> Key:
        """Root key."""
        return bytes.fromhex(self.stored.world.root)

    @property
    def keys(self) -> list[str]:
        """Node keys (hex) of the path."""
        return [chunk.key for chunk in self.stored.chunks]

    def key_after(self, chunks: int) -> Key:
        """The node key after so many chunks, the root's for none."""
        return bytes.fromhex(self.stored.chunks[chunks - 1].key) if chunks else self.root

    def next_key(self, controls: ChunkControls) -> Key:
        """The node key that the next chunk would have."""
        return node_key(self.key_after(len(self.stored.chunks)), controls.canonical())

    def view(self) -> WorldView:
        """For the caller."""
        chunks = self.stored.chunks
        return WorldView(
            world=self.stored.world,
            chunks=len(chunks),
            frames=sum(chunk.frames for chunk in chunks),
            fast_forward_k=chunks[-1].fast_forward_k if chunks else 0,
            used_at=self.stored.used_at,
            busy=self.users > 0,
            parked=not self.gang,
        )

    def chunk_view(self, index: int) -> ChunkView:
        """Of one chunk of the path."""
        world, chunk = self.stored.world, self.stored.chunks[index]
        return ChunkView(
            world=world.id,
            index=index,
            chunk=chunk,
            width=world.width,
            height=world.height,
            fps=world.fps,
            file=frames_file(world.id, chunk.key),
        )
