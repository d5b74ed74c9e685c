"""Everything the latent cache needs, opened and tried once: what cannot work is said before anything is served."""

from __future__ import annotations

import time
from pathlib import Path

from cache_actors.blob_store import StoreError
from cache_actors.disk_room import check_disk
from cache_actors.embedder import Embedder, EmbedderUnavailable, FolderEmbedder, checked
from cache_actors.latent_cache import LatentCache
from cache_actors.latent_config import FolderEmbedderConfig, LatentCacheConfig
from cache_actors.similarity_map import load_map

OWNER_WAIT_S = 30.0
"""How long a folder may still belong to a process that is being killed."""


def open_cache(config: LatentCacheConfig) -> LatentCache:
    """A cache that is not warm yet.

    Raises StoreError, MapError, EmbedderUnavailable, IndexUnavailable, each with its cure.
    """
    check_disk("latent_cache", Path(config.root), config.budget_gib)
    embedder = open_embedder(config)
    served = None if config.approximate is None else load_map(Path(config.approximate.similarity_map))
    deadline = time.monotonic() + OWNER_WAIT_S
    while True:
        try:
            return LatentCache(config, served, embedder)
        except StoreError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)


def open_embedder(config: LatentCacheConfig) -> Embedder | None:
    """None without level 2, and where the text encoder's own vectors come with each request.

    Raises EmbedderUnavailable, also when it does not embed two sentences into two directions.
    """
    if config.approximate is None or not isinstance(config.approximate.embedder, FolderEmbedderConfig):
        return None
    embedder = FolderEmbedder(config.approximate.embedder.folder, config.approximate.embedder.threads)
    try:
        one, two = (checked(vector, embedder.dim) for vector in embedder.embed(["a red fox", "quarterly tax report"]))
    except ValueError as error:
        raise EmbedderUnavailable(f"embedder.folder: its vectors cannot be used: {error}") from error
    if float(one @ two) > 0.999:
        raise EmbedderUnavailable("embedder.folder: unlike sentences get one vector; check that its weights are whole")
    return embedder
