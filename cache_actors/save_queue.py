"""Work for one thread, bounded in bytes: what does not fit is refused at once, so that no request waits for a disk."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

Item = TypeVar("Item")

logger = logging.getLogger(__name__)


class SaveQueue(Generic[Item]):
    """Calls `work(item)` in order on its own thread.  Safe to use from any thread."""

    def __init__(self, work: Callable[[Item], None], max_bytes: int) -> None:
        self._work, self._max_bytes = work, max_bytes
        self._changed = threading.Condition()
        self._items: deque[tuple[Item, int]] = deque()
        self._bytes = 0
        self._open = True
        self._thread = threading.Thread(target=self._run, name="latent-saves", daemon=True)
        self._thread.start()

    def offer(self, item: Item, size: int) -> bool:
        """False when `size` bytes more than `max_bytes` would wait or the queue is closed."""
        with self._changed:
            if not self._open or self._bytes + size > self._max_bytes:
                return False
            self._items.append((item, size))
            self._bytes += size
            self._changed.notify_all()
        return True

    def flush(self, timeout_s: float) -> bool:
        """Whether everything offered so far was done in time."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._bytes and not self._items, timeout_s)

    def close(self, timeout_s: float) -> int:
        """Take no more, work off what waits until the deadline; items dropped."""
        with self._changed:
            self._open = False
        self.flush(timeout_s)
        with self._changed:
            dropped = len(self._items)
            self._items.clear()
            self._changed.notify_all()
        self._thread.join(timeout_s)
        return dropped

    @property
    def waiting_bytes(self) -> int:
        """Of items not yet done."""
        with self._changed:
            return self._bytes

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._items or not self._open)
                if not self._items:
                    return
                item, size = self._items.popleft()
            try:
                self._work(item)
            except Exception:  # one bad item must not end all saving
                logger.exception("a save failed")
            with self._changed:
                self._bytes -= size
                self._changed.notify_all()
