"""Plain counters of the latent cache since its start: what `GET /v1/caches/latent` and the metrics show.

Safe to use from any thread.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from typing import Any

import numpy as np

from cache_actors.latent_report import CacheReport

_SECONDS_KEPT = 2000
"""Latest lookup times behind the percentiles."""


class LatentCounters:
    """One cache's."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lookups: Counter[tuple[int | None, str, str]] = Counter()
        """By level, decision and reason ("" on a hit)."""
        self._saves: Counter[str] = Counter()
        """Entries: stored, known, dropped, or why refused."""
        self._removed: Counter[str] = Counter()
        """Entries by why they left."""
        self._skipped_steps = 0
        self._saved_gpu_seconds = 0.0
        self._seconds: deque[float] = deque(maxlen=_SECONDS_KEPT)

    def looked_up(self, report: CacheReport, seconds: float, saved_gpu_seconds: float) -> None:
        """saved_gpu_seconds: what the skipped steps cost the donor.  In the shadow no step is skipped."""
        with self._lock:
            self._lookups[report.level, report.decision, str(report.reason or "")] += 1
            self._seconds.append(seconds)
            if report.decision == "hit" and not report.shadow:
                self._skipped_steps += report.skipped_steps
                self._saved_gpu_seconds += saved_gpu_seconds

    def saved(self, result: str, count: int = 1) -> None:
        """stored, known, dropped, or why an entry was refused."""
        with self._lock:
            self._saves[result] += count

    def removed(self, reason: str) -> None:
        """An entry has gone."""
        with self._lock:
            self._removed[reason] += 1

    def stats(self) -> dict[str, Any]:
        """hit_rate: hits of a level over all lookups that were no bypass."""
        with self._lock:
            lookups, seconds = dict(self._lookups), np.array(self._seconds or [0.0])
            counts = {"saves": dict(self._saves), "removed": dict(self._removed)}
            worth = {"skipped_steps": self._skipped_steps, "saved_gpu_seconds": self._saved_gpu_seconds}
        asked = sum(n for (_, decision, _), n in lookups.items() if decision in ("hit", "miss"))
        hits = {
            level: sum(n for (at, decision, _), n in lookups.items() if (at, decision) == (level, "hit"))
            for level in (0, 1, 2)
        }
        return {
            "lookups": [
                {"level": level, "decision": decision, "reason": reason or None, "count": n}
                for (level, decision, reason), n in sorted(lookups.items(), key=str)
            ],
            "hit_rate": {str(level): (n / asked if asked else 0.0) for level, n in hits.items()},
            "lookup_ms": {f"p{p}": float(np.percentile(seconds, p)) * 1000 for p in (50, 99)},
            **worth,
            **counts,
        }
