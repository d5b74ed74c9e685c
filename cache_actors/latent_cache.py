"""Reuse of denoising work between text-to-video requests.

Levels, tried in this order
    0  the same request            -> its files; nothing is computed
    1  the same trajectory         -> solver state at its deepest stored step; bit-equal from there
    2  a similar prompt            -> the latents of a donor entering step K; approximate, within a measured bound

Invariants
    An entry serves only requests whose key it shares (`latent_key`), so never another tenant's.
    What came from a donor is no donor and no solver state, and is a result only for requests that allow approximation.
    A payload is served after its hash was checked; whatever fails is quarantined and the next candidate tried.
    A lookup waits for no save, and for a prompt's vector only up to a deadline.
    A fault of the cache is a miss with a reason, never a failed request.

Safe to use from any thread.  Knows nothing of Ray.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from cache_actors.blob_store import BlobCorrupt, BlobMissing, BlobStore, Entry, EntryKey, Pin, SaveRefused
from cache_actors.embedder import Embedder
from cache_actors.known_entries import KnownEntries
from cache_actors.latent_audit import Audit
from cache_actors.latent_calls import Answer, Lookup, Save
from cache_actors.latent_config import LatentCacheConfig
from cache_actors.latent_counters import LatentCounters
from cache_actors.latent_entries import (
    BadLatents,
    EntryFacts,
    EntryFilter,
    Kind,
    check_latents,
    entry_key,
    latents_blob,
    prompt_sha256,
    shown,
)
from cache_actors.latent_report import CacheReport, Reason
from cache_actors.latent_shadow import ShadowResult
from cache_actors.save_queue import SaveQueue
from cache_actors.similar_donors import SimilarDonors
from cache_actors.similarity_map import SimilarityMap

_EMPTY_REASONS = (Reason.CORRUPT, Reason.EXPIRED, Reason.BLOB_MISSING)
_RESULTS: dict[str, tuple[Kind, ...]] = {"exact": ("result",), "approximate": ("result", "approx")}
"""Kinds of result that a request's word admits."""


class LatentCache:
    """config: checked block.  similarity_map, embedder: for level 2, both or neither; embedder None with the text
    encoder's own vectors.  Raises StoreError, MapError, IndexUnavailable: what cannot work stops the start.
    """

    def __init__(
        self,
        config: LatentCacheConfig,
        similarity_map: SimilarityMap | None = None,
        embedder: Embedder | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._config, self._clock = config, clock
        root = Path(config.root)
        self._known, self._counters = KnownEntries(), LatentCounters()
        self.warming = True
        self._audit = Audit(root / "audit", int(config.audit_max_mib * 2**20), config.audit_files, clock)
        self._store = BlobStore(root / "store", config.budget_bytes, self._gone, config.max_entries, clock)
        self._similar = None
        if config.approximate is not None:
            if similarity_map is None:
                raise ValueError("similarity_map: None, but level 2 is on; load the file that the configuration names")
            self._similar = SimilarDonors(
                config.approximate, config.max_entries, similarity_map, embedder, self._store, self._audit
            )
        self._queue: SaveQueue[Save] = SaveQueue(self._save, int(config.save_queue_mib * 2**20))

    # --- life ------------------------------------------------------------------------------------------------------

    def warm(self) -> None:
        """Take over what an earlier process left; lookups meanwhile find what has been read so far."""
        for entry in self._store.load():
            self._enter(entry)
        self.warming = False

    def close(self, timeout_s: float) -> None:
        """Work off waiting saves until the deadline, drop and count the rest, give the folder up."""
        dropped = self._queue.close(timeout_s)
        self._counters.saved("dropped", dropped)
        if self._similar is not None:
            self._similar.close()
        self._store.close()

    def flush(self, timeout_s: float) -> bool:
        """Whether all saves offered so far were done in time."""
        return self._queue.flush(timeout_s)

    # --- lookup ----------------------------------------------------------------------------------------------------

    def lookup(self, ask: Lookup) -> Answer:
        """The deepest reuse that the request allows.  Never raises for what the cache itself gets wrong."""
        began = time.perf_counter()
        return self._accounted(ask, self._lookup(ask), began)

    def _accounted(self, ask: Lookup, answer: Answer, began: float) -> Answer:
        seconds = time.perf_counter() - began
        report = answer.report.model_copy(update={"lookup_ms": round(seconds * 1000, 3)})
        self._account(ask, report, seconds)
        return Answer(report, answer.step, answer.blobs)

    def stored_result(self, ask: Lookup) -> Answer | None:
        """Level 0 alone, for a job that need not wait for its turn then.  None leaves no trace: a lookup follows."""
        sought = ask.word in ("exact", "approximate") and ask.seed_given and self._config.mode != "write_only"
        if not sought or not self._config.exact_results:
            return None
        began = time.perf_counter()
        for kind in _RESULTS[ask.word]:
            if self._store.get(entry_key(kind, ask.identity)) is not None:
                attempt = self._exact(ask, kind, 0)
                if isinstance(attempt, Answer):
                    return self._accounted(ask, attempt, began)
        return None

    def _lookup(self, ask: Lookup) -> Answer:
        seed_free = ask.word == "approximate" and ask.seed_policy == "donor" and self._similar is not None
        if self._config.mode == "write_only":
            return _without("bypass", Reason.WRITE_ONLY)
        if ask.word in ("off", "refresh"):
            return _without("bypass", Reason.BYPASS_REQUEST)
        if not ask.seed_given and not seed_free:
            return _without("bypass", Reason.NO_SEED)
        found: list[Reason] = []
        if ask.seed_given:
            for attempt in self._exact_levels(ask):
                if isinstance(attempt, Answer):
                    return attempt
                found.append(attempt)
        faults = [reason for reason in found if reason in _EMPTY_REASONS]
        if ask.word == "approximate" and self._similar is not None:
            similar = self._similar.lookup(ask)
            if similar.report.decision == "hit" or similar.report.reason is not Reason.NO_CANDIDATE:
                return similar
        if faults:
            return _without("miss", faults[0])
        if self.warming:
            return _without("miss", Reason.WARMING)
        differs = self._known.differs(ask.identity)
        if differs:
            detail = "this prompt is stored for another " + ", ".join(differs)
            return _without("miss", Reason.INCOMPATIBLE, detail=detail, differs=differs)
        off = ask.word == "approximate" and self._similar is None
        return _without("miss", Reason.NO_CANDIDATE, detail="level 2 is off on this server" if off else None)

    def _exact_levels(self, ask: Lookup) -> Iterator[Answer | Reason]:
        if self._config.exact_results:
            for kind in _RESULTS[ask.word]:
                yield self._exact(ask, kind, 0)
        if self._config.exact_states:
            yield self._exact(ask, "state", 1)

    def _exact(self, ask: Lookup, kind: Kind, level: int) -> Answer | Reason:
        key = entry_key(kind, ask.identity)
        entry = self._store.get(key)
        if entry is None:
            return Reason.NO_CANDIDATE
        facts = EntryFacts.model_validate(entry.facts)
        try:
            blobs = self._store.read(key)
            if kind == "state":
                check_latents(blobs["state"], ask.identity)
        except BlobMissing as missing:
            return Reason(missing.reason)
        except BlobCorrupt:
            return Reason.CORRUPT
        except BadLatents:
            self._store.condemn(key)
            return Reason.CORRUPT
        step = facts.steps[0] if kind == "state" else facts.num_inference_steps
        report = CacheReport(
            decision="hit",
            level=0 if level == 0 else 1,
            donor=key.name,
            similarity=1.0,
            skipped_steps=step,
            candidates_tried=1,
            seed_used=facts.seed,
            derived_depth=facts.derived_depth,
        )
        return Answer(report, step, blobs)

    def _account(self, ask: Lookup, report: CacheReport, seconds: float) -> None:
        self._counters.looked_up(report, seconds, self._worth(ask, report))
        fields: dict[str, Any] = {"level": report.level, "lookup_ms": report.lookup_ms}
        if self._config.audit_prompts:
            fields["prompt"] = ask.identity.prompt
        request = ask.where
        if report.decision == "hit":
            self._audit.write(
                "lookup_hit",
                request,
                cache_id=report.donor,
                task_type=ask.identity.task,
                skip_step=report.skipped_steps,
                similarity=report.similarity,
                shadow=report.shadow,
                **fields,
            )
        else:
            self._audit.write(
                "lookup_bypass" if report.decision == "bypass" else "lookup_miss",
                request,
                reason=report.reason,
                detail=report.detail,
                similarity=report.similarity,
                candidates_tried=report.candidates_tried,
                **fields,
            )

    def _worth(self, ask: Lookup, report: CacheReport) -> float:
        entry = self._store.get(EntryKey(ask.identity.partition(), report.donor or ""))
        if entry is None:
            return 0.0
        return float(entry.facts["gpu_seconds"]) * report.skipped_steps / ask.identity.num_inference_steps

    # --- save ------------------------------------------------------------------------------------------------------

    def offer(self, save: Save) -> bool:
        """Queue a save and return at once; False when nothing of it will be stored."""
        if self._config.mode == "read_only" or save.word == "off" or save.report.level == 0:
            return False
        if self._queue.offer(save, save.size):
            return True
        self._counters.saved("dropped")
        self._audit.write("save_dropped", save.where, bytes=save.size, waiting_bytes=self._queue.waiting_bytes)
        return False

    def _save(self, save: Save) -> None:
        derived = save.report.level == 2 and not save.report.shadow
        if save.files is not None and self._config.exact_results:
            self._put(save, "approx" if derived else "result", save.files, (), derived)
        if derived:
            return  # what a donor started is neither a donor nor bit-equal to anything
        if save.state is not None and self._config.exact_states:
            self._save_state(save, *save.state)
        if self._similar is not None:
            donors = {step: data for step, data in save.donors.items() if step in self._similar.steps}
            if donors:
                self._save_donor(save, donors)

    def _save_state(self, save: Save, step: int, data: bytes) -> None:
        if any(reused >= step for reused in save.identity.reused_steps):
            # Residuals are not part of the state: a resumed run would reuse less, and end elsewhere.
            self._refused(save, "state", "step_cache", f"steps after {step} reuse residuals from before it")
            return
        older = self._store.get(entry_key("state", save.identity))
        deeper = older is not None and older.facts["steps"][0] < step
        self._put(save, "state", {"state": data}, (step,), False, replacing=deeper)

    def _save_donor(self, save: Save, donors: Mapping[int, bytes]) -> None:
        assert self._similar is not None
        try:
            vector = self._similar.vector(save.identity.prompt, save.vector, timeout_s=None)
        except (ValueError, RuntimeError, TypeError) as error:
            self._refused(save, "donor", "encoder_error", str(error))
            return
        blobs = {latents_blob(step): data for step, data in sorted(donors.items())}
        self._put(save, "donor", {"vector": vector.tobytes(), **blobs}, tuple(sorted(donors)), False)

    def _put(
        self,
        save: Save,
        kind: Kind,
        blobs: Mapping[str, bytes],
        steps: tuple[int, ...],
        derived: bool,
        replacing: bool = False,
    ) -> None:
        identity, key = save.identity, entry_key(kind, save.identity)
        facts = EntryFacts(
            kind=kind,
            tenant=identity.tenant,
            prompt=identity.prompt,
            prompt_sha256=prompt_sha256(identity.prompt),
            seed=identity.seed,
            partition_fields=identity.partition_fields(),
            num_inference_steps=identity.num_inference_steps,
            steps=steps,
            derived_depth=save.report.derived_depth if derived else 0,
            parent=save.report.donor if derived else None,
            job_id=save.job_id,
            gpu_seconds=save.gpu_seconds,
            embedder=self._similar.fingerprint if self._similar is not None and kind == "donor" else None,
        )
        expires = None if self._config.ttl_s is None else self._clock() + self._config.ttl_s
        try:
            if kind in ("state", "donor"):
                for name, data in blobs.items():
                    if name != "vector":
                        check_latents(data, identity)
            entry = self._store.put(
                key, blobs, facts.model_dump(mode="json"), expires, replacing or save.word == "refresh"
            )
            if entry is None:
                self._counters.saved("known")
                return
            self._enter(entry)
        except SaveRefused as refused:
            self._refused(save, kind, refused.reason, str(refused))
            return
        except BadLatents as bad:
            self._refused(save, kind, "bad_latents", str(bad))
            return
        except RuntimeError as error:  # the index cannot take it: then no lookup may find half of it
            self._store.remove(key, "save_failed")
            self._refused(save, kind, "index_unavailable", str(error))
            return
        self._counters.saved("stored")
        self._audit.write(
            "save_stored",
            save.where,
            cache_id=key.name,
            task_type=identity.task,
            kind=kind,
            saved_steps=list(steps),
            size_mb=round(entry.disk_bytes / 1e6, 3),
            num_frames=identity.num_frames,
        )

    def _refused(self, save: Save, kind: Kind, reason: str, detail: str) -> None:
        self._counters.saved(reason)
        self._audit.write("save_failed", save.where, kind=kind, reason=reason, detail=detail)

    # --- the index beside the store --------------------------------------------------------------------------------

    def _enter(self, entry: Entry) -> None:
        if entry.facts["kind"] == "donor" and self._similar is not None:
            self._similar.add(entry)
        self._known.add(entry)

    def _gone(self, entry: Entry, reason: str) -> None:
        facts, key = entry.facts, entry.key
        self._counters.removed(reason)
        children = self._known.drop(entry)
        if facts["kind"] == "donor" and self._similar is not None and reason != "replaced":
            self._similar.remove(key)
        if reason not in ("replaced", "save_failed"):
            event = reason if reason in ("purged", "quarantined") else "evicted"
            where = {"tenant": facts["tenant"], "partition": key.partition}
            self._audit.write(event, where, cache_id=key.name, reason=reason, size_mb=round(entry.disk_bytes / 1e6, 3))
        if reason in ("purged", "quarantined"):
            for child in children:  # what an unwanted or faulty donor started goes with it
                self._store.remove(child, reason)

    # --- operators -------------------------------------------------------------------------------------------------

    def entries(self, which: EntryFilter, limit: int, after: str | None = None) -> list[dict[str, Any]] | None:
        """At most `limit` entries, latest use first, those behind the one named `after`; None if that has gone."""
        now = self._clock()
        found = [entry for entry in reversed(self._store.entries()) if which.admits(entry, now)]
        names = [entry.key.name for entry in found]
        if after is not None and after not in names:
            return None
        start = 0 if after is None else names.index(after) + 1
        return [shown(entry) for entry in found[start : start + limit]]

    def entry(self, name: str) -> dict[str, Any] | None:
        """One entry as its operator sees it."""
        entry = self._named(name)
        return None if entry is None else shown(entry)

    def purge(self, which: EntryFilter, dry_run: bool) -> dict[str, Any]:
        """Remove, or only count, what the filter admits: `entries` (names) and `bytes`."""
        now = self._clock()
        found = [entry for entry in self._store.entries() if which.admits(entry, now)]
        if not dry_run:
            for entry in found:
                self._store.remove(entry.key)
        names = [entry.key.name for entry in found]
        return {"entries": names, "bytes": sum(entry.disk_bytes for entry in found), "dry_run": dry_run}

    def remove(self, name: str) -> bool:
        """Whether it was there."""
        entry = self._named(name)
        return entry is not None and self._store.remove(entry.key) is not None

    def pin(self, name: str, pin: Pin | None) -> dict[str, Any] | None:
        """Keep an entry until the pin's end, or let it go again with None.  None for an entry that is not there."""
        found = self._named(name)
        if found is None:
            return None
        try:
            entry = self._store.pin(found.key, pin)
        except BlobMissing:  # it has gone since
            return None
        owner = {"owner": pin.owner, "until": pin.until} if pin else {}
        where = {"tenant": entry.facts["tenant"], "partition": entry.key.partition}
        self._audit.write("pinned" if pin else "unpinned", where, cache_id=name, **owner)
        return shown(entry)

    def _named(self, name: str) -> Entry | None:
        return next((entry for entry in self._store.entries() if entry.key.name == name), None)

    def sweep(self) -> int:
        """Remove entries whose time is over; how many.  To be called now and then."""
        return self._store.sweep()

    def record_shadow(self, result: ShadowResult) -> None:
        """The measured difference of a hit that ran in the shadow."""
        if self._similar is None:
            raise ValueError("shadow: level 2 is off, there was no hit to compare")
        fields = result.model_dump(exclude={"request_id", "job_id", "tenant", "partition"})
        request = result.model_dump(include={"request_id", "job_id", "tenant", "partition"})
        self._audit.write("shadow_result", request, **fields)
        if self._similar.shadow.record(result):
            self._audit.write("tier_suspended", request, skip_steps=result.skip_steps)

    def stats(self) -> dict[str, Any]:
        """Plain numbers for `GET /v1/caches/latent` and the metrics."""
        return {
            "mode": self._config.mode,
            "warming": self.warming,
            "entries": dict(Counter(entry.facts["kind"] for entry in self._store.entries())),
            "disk_bytes": self._store.disk_bytes,
            "budget_bytes": self._config.budget_bytes,
            "save_queue_bytes": self._queue.waiting_bytes,
            **self._counters.stats(),
            "audit": dict(self._audit.counts),
            "similar": None if self._similar is None else self._similar.stats(),
        }


def _without(decision: str, reason: Reason, **fields: Any) -> Answer:
    return Answer(CacheReport.model_validate({"decision": decision, "reason": reason, **fields}))
