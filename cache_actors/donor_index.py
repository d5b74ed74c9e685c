"""Which donors of a partition have prompts like this one: a vector index for each partition.

Safe to use from any thread.  A label names an entry as long as it is stored; one whose entry has gone is dropped at the
first touch.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from itertools import count

from cache_actors.blob_store import EntryKey
from cache_actors.embedder import Vector
from cache_actors.vector_index import EXACT_UP_TO, VectorIndex


@dataclass(frozen=True)
class Candidate:
    """A donor and the index's estimate of its similarity."""

    key: EntryKey
    score: float


class DonorIndex:
    """dim: of the vectors.  exact_up_to: donors of one partition that are searched exactly."""

    def __init__(self, dim: int, exact_up_to: int = EXACT_UP_TO) -> None:
        self._dim, self._exact_up_to = dim, exact_up_to
        self._lock = threading.Lock()
        self._partitions: dict[str, VectorIndex] = {}
        self._labels: dict[EntryKey, int] = {}
        self._keys: dict[int, EntryKey] = {}
        self._next = count()

    def __len__(self) -> int:
        with self._lock:
            return len(self._labels)

    def add(self, key: EntryKey, vector: Vector) -> None:
        """vector: [dim], length 1; replaces an older one.  Raises IndexUnavailable."""
        with self._lock:
            index = self._partitions.setdefault(key.partition, VectorIndex(self._dim, self._exact_up_to))
            label = self._labels.get(key)
            if label is None:
                label = next(self._next)
        index.add(label, vector)
        with self._lock:
            self._labels[key], self._keys[label] = label, key

    def remove(self, key: EntryKey) -> None:
        """An unknown key is no error."""
        with self._lock:
            label = self._labels.pop(key, None)
            if label is None:
                return
            del self._keys[label]
            index = self._partitions[key.partition]
        index.remove(label)

    def nearest(self, partition: str, vector: Vector, count: int) -> list[Candidate]:
        """Best first."""
        with self._lock:
            index = self._partitions.get(partition)
        if index is None:
            return []
        found = index.search(vector, count)
        with self._lock:
            return [Candidate(self._keys[label], score) for label, score in found if label in self._keys]

    @property
    def memory_bytes(self) -> int:
        """Of all partitions."""
        with self._lock:
            indexes = list(self._partitions.values())
        return sum(index.memory_bytes for index in indexes)
