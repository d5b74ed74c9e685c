"""Vectors of prompts with a deadline: one thread embeds, whoever waits gives up in time, nothing is embedded twice."""

from __future__ import annotations

import threading
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor

from cache_actors.embedder import Embedder, Vector, checked

REMEMBERED = 10_000
"""Vectors kept: 15 MB at 384 dimensions."""


class PromptVectors:
    """Safe to use from any thread."""

    def __init__(self, embedder: Embedder) -> None:
        self._embedder = embedder
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="embedder")
        self._lock = threading.Lock()
        self._known: OrderedDict[str, Future[Vector]] = OrderedDict()

    def of(self, text: str, timeout_s: float | None) -> Vector:
        """[dim] of length 1.  Raises TimeoutError, after which the work goes on for the next to ask; what embedding
        raises; BadVector."""
        with self._lock:
            future = self._known.get(text)
            if future is None:
                future = self._known[text] = self._thread.submit(self._embed, text)
                if len(self._known) > REMEMBERED:
                    self._known.popitem(last=False)
            else:
                self._known.move_to_end(text)
        try:
            return future.result(timeout_s)
        except Exception:
            if future.done():
                with self._lock:
                    self._known.pop(text, None)  # a fault is not remembered
            raise

    def close(self) -> None:
        """Wait for nothing."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _embed(self, text: str) -> Vector:
        return checked(self._embedder.embed([text])[0], self._embedder.dim)
