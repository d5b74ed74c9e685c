"""What cannot work stops the start, with one message that names the field and the cure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cache_actors import latent_start
from cache_actors.blob_store import StoreError
from cache_actors.embedder import EmbedderUnavailable
from cache_actors.latent_start import open_cache
from cache_actors.similarity_map import MapError
from cache_actors.vector_index import IndexUnavailable
from tests.latents import WordEmbedder, config, identity, similarity_map
from tests.latents import ask as asked


def test_exact_reuse_needs_nothing_more(tmp_path: Path) -> None:
    cache = open_cache(config(tmp_path))
    cache.warm()
    assert asked(cache, identity()).report.decision == "miss"


def test_no_embedder(tmp_path: Path) -> None:
    with pytest.raises(EmbedderUnavailable, match=r"embedder\.folder: 'absent' is no folder here; .*pip install"):
        open_cache(config(tmp_path, {"embedder": {"kind": "folder", "folder": "absent"}}))


def served(monkeypatch: pytest.MonkeyPatch, embedder: Any) -> None:
    monkeypatch.setattr(latent_start, "FolderEmbedder", lambda folder, threads: embedder)


def test_an_embedder_with_broken_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = WordEmbedder()
    served(monkeypatch, broken)
    for vectors, message in ((np.ones((2, 64)), "one vector"), (np.full((2, 64), np.nan), "cannot be used")):
        broken.embed = lambda texts, vectors=vectors: vectors  # type: ignore[method-assign, misc]
        with pytest.raises(EmbedderUnavailable, match=message):
            open_cache(config(tmp_path, {}))


def test_no_map(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served(monkeypatch, WordEmbedder())
    with pytest.raises(MapError, match=r"similarity_map: unread cannot be read.*calibrate_latent_cache"):
        open_cache(config(tmp_path, {}))


def test_more_entries_than_exact_search_serves_need_the_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served(monkeypatch, WordEmbedder())
    monkeypatch.setattr(latent_start, "load_map", lambda path: similarity_map())
    monkeypatch.setitem(__import__("sys").modules, "faiss", None)
    open_cache(config(tmp_path / "a", {}, max_entries=100_000)).close(1)
    with pytest.raises(IndexUnavailable, match=r"faiss.*max_entries"):
        open_cache(config(tmp_path / "b", {}, max_entries=100_001))


def test_a_folder_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=r"latent_cache\.root"):
        open_cache(config(tmp_path / "file"))
    with pytest.raises(StoreError, match=r"latent_cache\.budget_gib: 10000000"):
        open_cache(config(tmp_path / "root", budget_gib=1e7))


def test_a_folder_of_another_cache_is_waited_for_and_then_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(latent_start, "OWNER_WAIT_S", 0.3)
    first = open_cache(config(tmp_path))
    with pytest.raises(StoreError, match="belongs to another running cache"):
        open_cache(config(tmp_path))
    first.close(1)
    open_cache(config(tmp_path)).close(1)
