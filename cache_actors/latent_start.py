"""Everything the latent cache needs, opened and tried once: what cannot work is said before anything is served."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

from cache_actors.blob_store import StoreError
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
    check_disk(config)
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


def check_disk(config: LatentCacheConfig) -> None:
    """Raises StoreError when the folder cannot be made or the disk has less room than the budget."""
    root = Path(config.root)
    try:
        root.mkdir(parents=True, exist_ok=True)
        room = shutil.disk_usage(root).free
        if room < config.budget_bytes:  # what is stored already is part of the budget
            room += sum(path.stat().st_size for path in root.rglob("*") if path.is_file())
    except OSError as error:
        raise StoreError(f"latent_cache.root: {root} cannot be used: {error}; name a writable folder") from error
    if room < config.budget_bytes:
        raise StoreError(
            f"latent_cache.budget_gib: {config.budget_gib} exceeds the {room / 2**30:.1f} GiB that {root} can hold; "
            "lower it or name a folder on a larger disk"
        )
