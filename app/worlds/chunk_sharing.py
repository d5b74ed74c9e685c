"""Chunks shared between worlds through the cache actor: looked for before they are made, put there afterwards.

Whatever is wrong with the cache, a world goes on: what cannot be had is made.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cache_actors.blob_store import SaveRefused
from cache_actors.keys import Key, WorldMaterial, path_keys
from cache_actors.world_cache import NodeGone
from cache_actors.world_cache_actor import WorldCacheAway, WorldCacheClient

logger = logging.getLogger("ray.serve")


@dataclass(frozen=True)
class Shared:
    """A chunk that was found."""

    entry: bytes
    """Of `JournalEntry.to_bytes`."""
    frames: bytes | None
    """Of `video_file.frames_npz`, where they were shared too."""


class ChunkSharing:
    """The driver's side of the cache."""

    def __init__(self, cache: WorldCacheClient) -> None:
        self._cache = cache

    async def open_world(self, material: WorldMaterial) -> None:
        """A world's chunks may be shared from now on.  Raises `world_cache.RootMismatch`."""
        try:
            await self._cache.open_world(material)
        except (SaveRefused, WorldCacheAway) as error:
            logger.warning("a world is not shared: %s", error)

    async def recall(self, key: str) -> Shared | None:
        """A chunk by its node key (hex), None where it must be made."""
        node = bytes.fromhex(key)
        try:
            found = await self._cache.find(node)
            if found is None:
                return None
            entry = await self._cache.read(node)
            return Shared(entry, await self._frames(node) if found.has_frames else None)
        except (NodeGone, WorldCacheAway) as error:
            logger.warning("chunk %s is made again: %s", key, error)
            return None

    async def share(self, root: Key, actions: Sequence[bytes], entry: Callable[[int], bytes]) -> None:
        """Put a path's chunks there for others, those that are not there yet.

        actions: canonical controls of its chunks.  entry: reads a chunk's `JournalEntry` bytes.
        """
        keys = path_keys(root, list(actions))
        try:
            known = len(await self._cache.match(root, actions))
            for chunk in range(known, len(actions)):
                parent = keys[chunk - 1] if chunk else root
                await self._cache.put(root, parent, actions[chunk], await asyncio.to_thread(entry, chunk))
        except (KeyError, SaveRefused, OSError, WorldCacheAway) as error:
            # KeyError: one before it was evicted in between.  OSError: a rewind has dropped it, or the storage is away.
            logger.warning("a chunk is not shared: %r", error)

    async def share_frames(self, key: str, frames: bytes) -> None:
        """Put a chunk's frames there, if the chunk itself is."""
        try:
            await self._cache.put_frames(bytes.fromhex(key), frames)
        except (NodeGone, SaveRefused, WorldCacheAway) as error:
            logger.info("frames of chunk %s are not shared: %s", key, error)

    async def _frames(self, node: Key) -> bytes | None:
        try:
            return await self._cache.read_frames(node)
        except NodeGone:
            return None
