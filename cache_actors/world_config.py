"""The `world_cache:` block of a Serve config.  Imports nothing of the cache itself: absent means absent."""

from __future__ import annotations

from pydantic import Field

from cache_actors.closed import Closed


class WorldCacheConfig(Closed):
    """The whole block."""

    root: str = Field("worldstage-data/world-cache", description="Folder on a disk of the head node.")
    budget_gib: float = Field(20.0, gt=0, description="Bytes below `root`.")
    ttl_s: float | None = Field(
        30 * 86400.0, gt=0, description="Unused for so long a chunk may go; None: until evicted."
    )

    @property
    def budget_bytes(self) -> int:
        """Bytes below `root`."""
        return int(self.budget_gib * 2**30)
