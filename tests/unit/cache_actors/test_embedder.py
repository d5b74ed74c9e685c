"""Vectors of a folder, the refusals of folders that cannot be used, and pooling by hand."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from cache_actors.embedder import (
    PACKAGE,
    BadVector,
    EmbedderUnavailable,
    FolderEmbedder,
    checked,
    mean_pool,
    pool_text_states,
    unit,
)


def test_mean_pool_counts_masked_tokens_only() -> None:
    states = torch.tensor([[[1.0, 0.0], [3.0, 4.0], [100.0, 100.0]]])
    assert mean_pool(states, torch.tensor([[1, 1, 0]])).tolist() == [[2.0, 2.0]]


def test_text_states_are_pooled_without_their_padding() -> None:
    states = torch.tensor([[[3.0, 0.0], [0.0, 4.0], [0.0, 0.0], [0.0, 0.0]]], dtype=torch.bfloat16)
    assert pool_text_states(states).tolist() == pytest.approx([0.6, 0.8])  # (1.5, 2) / 2.5
    with pytest.raises(BadVector):
        pool_text_states(torch.zeros(1, 3, 2))


@pytest.mark.parametrize("bad", [[float("nan"), 1.0], [0.0, 0.0], [float("inf"), 0.0]])
def test_bad_vectors_are_refused(bad: list[float]) -> None:
    with pytest.raises(BadVector):
        unit(np.array([bad]))
    with pytest.raises(BadVector):
        checked(np.array(bad), 2)


def test_a_vector_of_another_length_is_refused() -> None:
    with pytest.raises(BadVector, match=r"\(3,\)"):
        checked(np.ones(3), 2)
    assert checked(np.array([3.0, 4.0]), 2).tolist() == pytest.approx([0.6, 0.8])


def test_what_is_missing_is_said_with_the_cure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EmbedderUnavailable, match=r"no folder here.*worldstage\[semantic\]"):
        FolderEmbedder(str(tmp_path / "absent"))
    with pytest.raises(EmbedderUnavailable, match=r"no sentence-transformers folder.*modules\.json"):
        FolderEmbedder(str(tmp_path))
    monkeypatch.setitem(__import__("sys").modules, PACKAGE, None)
    with pytest.raises(EmbedderUnavailable, match=r"not installed.*worldstage\[semantic\]"):
        FolderEmbedder(PACKAGE)


@pytest.mark.parametrize(
    ("modules", "pooling", "message"),
    [
        (["Transformer", "Pooling", "Dense"], {"pooling_mode_mean_tokens": True}, "Dense"),
        (["Transformer", "Pooling"], {"pooling_mode_cls_token": True}, "pooling_mode_cls_token"),
    ],
)
def test_a_folder_that_computes_otherwise_is_refused(
    tmp_path: Path, modules: list[str], pooling: dict, message: str
) -> None:
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "modules.json").write_text(json.dumps([{"type": f"sentence_transformers.models.{m}"} for m in modules]))
    (tmp_path / "1_Pooling/config.json").write_text(json.dumps(pooling))
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 256}')
    with pytest.raises(EmbedderUnavailable, match=message):
        FolderEmbedder(str(tmp_path))


def test_minilm() -> None:
    pytest.importorskip(PACKAGE, reason="needs the extra `semantic`")
    embedder = FolderEmbedder(PACKAGE)
    texts = ["A red fox runs through deep snow", "a red fox running through deep snow", "Quarterly tax report"]
    vectors = embedder.embed(texts)
    assert vectors.shape == (3, embedder.dim) == (3, 384)
    assert vectors.dtype == np.float32
    # Padding in a batch takes no part: fp32 sums over another length round differently, by far less than this.
    assert np.abs(embedder.embed(texts[:1])[0] - vectors[0]).max() < 1e-5
    cosines = vectors @ vectors[0]
    assert cosines[1] > 0.95 > 0.3 > cosines[2]
    assert np.linalg.norm(vectors, axis=1) == pytest.approx([1, 1, 1], abs=1e-5)
    assert FolderEmbedder(PACKAGE).fingerprint == embedder.fingerprint
