"""Keys and values of finished chunks, kept in the memory of the host beside their stage.

A blob is a pure function of its node key (and the stage's block range), so sessions that share a prefix share it, and
a blob that is gone costs a clean pass, never a result.  Least recently used blobs go first.

A GPU copies only to and from page-locked memory while it computes.  Locking takes a good part of a second a gigabyte,
so it is done before anybody waits (`reserve`); torch's allocator then hands the same memory out again and again.
"""

from __future__ import annotations

import threading
from collections import OrderedDict

import torch
from torch import Tensor

from cache_actors.keys import Key
from deployments.lingbot.kv_ring import KVBlob


class KVStore:
    """One stage's blobs by node key.  Safe to ask from any thread; blobs are moved on the device's thread.

    pinned: whether a GPU copies to and from them.  torch locks memory in powers of two: what is locked may be up to
    twice the budget, which counts the blobs themselves, alike on every stage.
    """

    def __init__(self, budget_bytes: int, *, pinned: bool = False) -> None:
        if budget_bytes < 0:
            raise ValueError(f"budget_bytes: got {budget_bytes}, expected 0 (keeps nothing) or more")
        self._budget, self._pinned = budget_bytes, pinned
        self._lock = threading.Lock()
        self._blobs: OrderedDict[Key, KVBlob] = OrderedDict()
        self._nbytes = 0

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self._nbytes

    def reserve(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        """Lock memory for as many blobs of this shape as the budget holds; how many."""
        count = self._budget // _nbytes(shape, dtype) if self._pinned else 0
        blobs = [torch.empty(shape, dtype=dtype, pin_memory=True) for _ in range(count)]
        return len(blobs)  # their memory goes to torch's allocator, which keeps it locked

    def room(self, key: Key, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor | None:
        """Host memory for a blob that is not held yet; None where it is held already or is beyond the budget.

        Others are dropped first, so that theirs can be used again.
        """
        size = _nbytes(shape, dtype)
        if self.has(key) or size > self._budget:
            return None
        with self._lock:
            self._make_room(size)
        return torch.empty(shape, dtype=dtype, pin_memory=self._pinned)

    def put(self, key: Key, blob: KVBlob) -> None:
        """Hold a blob, dropping others until it fits."""
        with self._lock:
            if key in self._blobs or blob.nbytes > self._budget:
                return
            self._make_room(blob.nbytes)
            self._blobs[key] = blob
            self._nbytes += blob.nbytes

    def has(self, key: Key) -> bool:
        """Whether a blob is held; it may be gone a moment later."""
        with self._lock:
            return key in self._blobs

    def get(self, key: Key) -> KVBlob | None:
        """The blob, None where it is not held.  It lives as long as the caller keeps it."""
        with self._lock:
            if key not in self._blobs:
                return None
            self._blobs.move_to_end(key)
            return self._blobs[key]

    def drop(self, key: Key) -> None:
        """Forget a blob; absent is what is wanted."""
        with self._lock:
            dropped = self._blobs.pop(key, None)
            self._nbytes -= dropped.nbytes if dropped is not None else 0

    def _make_room(self, size: int) -> None:
        while self._nbytes + size > self._budget:
            _, dropped = self._blobs.popitem(last=False)
            self._nbytes -= dropped.nbytes


def _nbytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return torch.Size(shape).numel() * dtype.itemsize
