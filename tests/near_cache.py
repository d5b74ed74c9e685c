"""`app.api.latent_cache.LatentCacheCalls` without the actor between."""

from __future__ import annotations

from typing import Any

from cache_actors.latent_cache import LatentCache


class Near:
    """away: every call fails, as when the actor is gone."""

    def __init__(self, cache: LatentCache) -> None:
        self.cache = cache
        self.away = False

    async def call(self, method: str, *args: object) -> Any:
        if self.away:
            raise RuntimeError("away")
        return getattr(self.cache, method)(*args)
