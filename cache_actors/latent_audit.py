"""The audit log: one JSON object a line, rotated by size, and counters that say the same.

Every line has `timestamp` (Unix seconds), `event_type`, `v`, `request_id`, `job_id`, `tenant`, `partition`; the three
last are null where an event belongs to no request.  A log that cannot be written is counted and breaks nothing.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

AUDIT_VERSION = 1
EVENTS = frozenset(
    {
        "lookup_hit",
        "lookup_miss",
        "lookup_bypass",
        "save_stored",
        "save_dropped",
        "save_failed",
        "evicted",
        "quarantined",
        "kv_missing_after_vector_hit",
        "pinned",
        "unpinned",
        "purged",
        "shadow_result",
        "tier_suspended",
    }
)

logger = logging.getLogger(__name__)


class Audit:
    """Appends to `<folder>/audit.jsonl`; whole older files are `audit-<ns>.jsonl`.  Safe to use from any thread."""

    def __init__(self, folder: Path, max_bytes: int, keep: int, clock: Callable[[], float] = time.time) -> None:
        self._path, self._max_bytes, self._keep, self._clock = folder / "audit.jsonl", max_bytes, keep, clock
        self._lock = threading.Lock()
        self.counts: Counter[str] = Counter()
        """Events by type since the start, and `audit_failures`."""
        folder.mkdir(parents=True, exist_ok=True)

    def write(self, event_type: str, request: Mapping[str, Any] | None = None, **fields: Any) -> None:
        """request: request_id, job_id, tenant and partition, as far as there are any."""
        assert event_type in EVENTS, event_type
        line = {
            "timestamp": self._clock(),
            "event_type": event_type,
            "v": AUDIT_VERSION,
            **{name: (request or {}).get(name) for name in ("request_id", "job_id", "tenant", "partition")},
            **fields,
        }
        with self._lock:
            self.counts[event_type] += 1
            try:
                self._rotate()
                with self._path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(line) + "\n")
            except OSError as error:
                self.counts["audit_failures"] += 1
                if self.counts["audit_failures"] == 1:
                    logger.warning("audit log %s cannot be written: %s", self._path, error)

    def _rotate(self) -> None:
        if not self._path.exists() or self._path.stat().st_size < self._max_bytes:
            return
        self._path.rename(self._path.with_name(f"audit-{time.time_ns()}.jsonl"))
        for old in sorted(self._path.parent.glob("audit-*.jsonl"))[: -self._keep]:
            old.unlink()
