"""Nearest vectors of one partition: exact up to a size, an inverted file above it.

Up to `exact_up_to` vectors a search is one matrix product over all of them.  Above, faiss' inverted file with 8-bit
codes takes over: it was chosen over HNSW (hnswlib, usearch) because entries come and go all the time here, which costs
it one list operation, and because it builds several times faster.  Its scores are rounded: rescore what you serve.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cache_actors.embedder import Vector

EXACT_UP_TO = 100_000

_TRAINING_POINTS_A_LIST = 40
"""faiss asks for 39 to 256; fewer train faster and lose no measurable recall of near neighbours."""
_PROBED_SHARE = 1 / 128
"""Of the lists, searched for each query."""

Match = tuple[int, float]
"""Label and cosine."""


class IndexUnavailable(RuntimeError):
    """The partition has outgrown exact search and the library for more is missing."""


class ExactIndex:
    """A growing matrix.  Not locked."""

    def __init__(self, dim: int) -> None:
        self._matrix: Vector = np.empty((64, dim), np.float32)
        self._labels: NDArray[np.int64] = np.empty(64, np.int64)
        self._rows: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, label: int, vector: Vector) -> None:
        """vector: [dim], length 1."""
        row = self._rows.setdefault(label, len(self._rows))
        if row == len(self._matrix):
            self._matrix = np.concatenate([self._matrix, np.empty_like(self._matrix)])
            self._labels = np.concatenate([self._labels, np.empty_like(self._labels)])
        self._matrix[row], self._labels[row] = vector, label

    def remove(self, label: int) -> None:
        """The last row takes its place."""
        row, last = self._rows.pop(label), len(self._rows)
        if row != last:
            self._matrix[row], self._labels[row] = self._matrix[last], self._labels[last]
            self._rows[int(self._labels[row])] = row

    def search(self, vector: Vector, count: int) -> list[Match]:
        """The `count` nearest, best first; equal scores by label."""
        scores = self._matrix[: len(self)] @ vector
        best = np.argpartition(-scores, count - 1)[:count] if count < len(scores) else np.arange(len(scores))
        found = ((int(self._labels[row]), float(scores[row])) for row in best)
        return sorted(found, key=lambda match: (-match[1], match[0]))

    def all(self) -> tuple[NDArray[np.int64], Vector]:
        """Copies of labels [N] and vectors [N, dim]."""
        return self._labels[: len(self)].copy(), self._matrix[: len(self)].copy()

    @property
    def memory_bytes(self) -> int:
        """Of the arrays, and of the label table by estimate."""
        return self._matrix.nbytes + self._labels.nbytes + 100 * len(self)


class InvertedIndex:
    """faiss IVF with 8-bit scalar codes, trained on the vectors it starts with.  Not locked.

    labels: [N]; vectors: [N, dim] of length 1.  capacity: vectors it is laid out for.  Raises IndexUnavailable.
    """

    def __init__(self, labels: NDArray[np.int64], vectors: Vector, capacity: int) -> None:
        faiss = _faiss()
        dim, lists = vectors.shape[1], 2 ** round(math.log2(max(4, 2 * math.sqrt(capacity))))
        self._quantizer = faiss.IndexFlatIP(dim)
        self._index = faiss.IndexIVFScalarQuantizer(
            self._quantizer, dim, lists, faiss.ScalarQuantizer.QT_8bit, faiss.METRIC_INNER_PRODUCT
        )
        self._index.nprobe = max(8, round(lists * _PROBED_SHARE))
        rng = np.random.default_rng(0)
        sample = rng.permutation(len(vectors))[: _TRAINING_POINTS_A_LIST * lists]
        self._index.train(vectors[np.sort(sample)])
        # Removing by label would scan every list without it.
        self._index.set_direct_map_type(faiss.DirectMap.Hashtable)
        self._index.add_with_ids(vectors, labels)
        self._labels = set(labels.tolist())
        self._select = faiss.IDSelectorArray

    def __len__(self) -> int:
        return int(self._index.ntotal)

    def add(self, label: int, vector: Vector) -> None:
        """vector: [dim], length 1."""
        if label in self._labels:
            self.remove(label)
        self.add_all(np.array([label]), vector[None])

    def add_all(self, labels: NDArray[np.int64], vectors: Vector) -> None:
        """labels: [N], new ones; vectors: [N, dim]."""
        self._index.add_with_ids(vectors, labels)
        self._labels |= set(labels.tolist())

    def remove(self, label: int) -> None:
        """KeyError for an unknown label."""
        self._labels.remove(label)
        self._index.remove_ids(self._select(np.array([label], np.int64)))

    def search(self, vector: Vector, count: int) -> list[Match]:
        """About the `count` nearest, best first."""
        scores, labels = self._index.search(vector[None], count)
        return [(int(a), float(b)) for a, b in zip(labels[0], scores[0], strict=True) if a >= 0]

    @property
    def memory_bytes(self) -> int:
        """Codes, labels, centroids; hash table and label set by estimate."""
        size = self._index.code_size + 8 + 48 + 60
        return len(self) * size + self._index.nlist * self._index.d * 4


class VectorIndex:
    """Exact, then inverted.  Safe to use from any thread; a search waits for no training.

    exact_up_to: above it `add` trains an inverted file, on its own thread's time.
    """

    def __init__(self, dim: int, exact_up_to: int = EXACT_UP_TO) -> None:
        self._exact_up_to = exact_up_to
        self._lock = threading.Lock()
        self._growing = threading.Lock()
        self._index: ExactIndex | InvertedIndex = ExactIndex(dim)

    def __len__(self) -> int:
        with self._lock:
            return len(self._index)

    def add(self, label: int, vector: Vector) -> None:
        """vector: [dim], length 1.  Raises IndexUnavailable, then the vector is not in the index."""
        with self._growing:
            self._grow_if_full()
            with self._lock:
                self._index.add(label, vector)

    def remove(self, label: int) -> None:
        """KeyError for an unknown label."""
        with self._growing, self._lock:
            self._index.remove(label)

    def search(self, vector: Vector, count: int) -> list[Match]:
        """The `count` nearest, best first."""
        with self._lock:
            return self._index.search(vector, count)

    @property
    def memory_bytes(self) -> int:
        """Of vectors and labels."""
        with self._lock:
            return self._index.memory_bytes

    def _grow_if_full(self) -> None:
        index = self._index
        if isinstance(index, ExactIndex) and len(index) >= self._exact_up_to:
            labels, vectors = index.all()
            inverted = InvertedIndex(labels, vectors, capacity=10 * self._exact_up_to)
            with self._lock:
                self._index = inverted


def require_library(entries: int, exact_up_to: int = EXACT_UP_TO) -> None:
    """Raises IndexUnavailable when so many entries need the library and it is missing: ask at the start."""
    if entries > exact_up_to:
        _faiss()


def rescored(vector: Vector, stored: Sequence[float] | Vector) -> float:
    """The exact cosine of two vectors of length 1, for a match whose score was rounded."""
    return float(np.dot(vector, np.asarray(stored, np.float32)))


def _faiss() -> Any:
    try:
        import faiss
    except ImportError as missing:
        raise IndexUnavailable(
            "vector index: more entries than exact search serves in time need faiss; run `pip install "
            "'worldstage[semantic]'` or lower latent_cache.max_entries"
        ) from missing
    return faiss
