"""What is remembered of stored entries beside the store: who has a prompt, and what derives from a donor.

Safe to use from any thread.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict

from cache_actors.blob_store import Entry, EntryKey
from cache_actors.latent_entries import prompt_sha256
from cache_actors.latent_key import LatentIdentity


class KnownEntries:
    """Follows the store: `add` after an entry became ready, `drop` after it has gone."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._prompts: defaultdict[tuple[str, str], Counter[str]] = defaultdict(Counter)
        """Entries by (tenant, prompt hash), then by partition."""
        self._fields: dict[str, dict[str, str]] = {}
        """Digests of a partition's fields."""
        self._children: defaultdict[EntryKey, set[EntryKey]] = defaultdict(set)
        """Results by the donor they derive from."""

    def add(self, entry: Entry) -> None:
        """An entry is ready."""
        facts, key = entry.facts, entry.key
        with self._lock:
            self._prompts[facts["tenant"], facts["prompt_sha256"]][key.partition] += 1
            self._fields[key.partition] = facts["partition_fields"]
            if facts["parent"] is not None:
                self._children[EntryKey(key.partition, facts["parent"])].add(key)

    def drop(self, entry: Entry) -> set[EntryKey]:
        """An entry has gone; what derives from it is returned, and forgotten."""
        facts, key = entry.facts, entry.key
        prompt = (facts["tenant"], facts["prompt_sha256"])
        with self._lock:
            known = self._prompts[prompt]
            known[key.partition] -= 1
            if known[key.partition] <= 0:
                del known[key.partition]
            if not known:
                del self._prompts[prompt]
            if facts["parent"] is not None:
                self._children[EntryKey(key.partition, facts["parent"])].discard(key)
            return self._children.pop(key, set())

    def differs(self, identity: LatentIdentity) -> tuple[str, ...]:
        """Fields in which the closest stored request of this tenant and prompt is another; none when there is none."""
        with self._lock:
            known = self._prompts.get((identity.tenant, prompt_sha256(identity.prompt)), Counter())
            stored = [self._fields[partition] for partition in known if partition != identity.partition()]
        mine = identity.partition_fields()
        differences = [tuple(name for name in mine if other.get(name) != mine[name]) for other in stored]
        return min(differences, key=len, default=())
