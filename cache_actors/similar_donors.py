"""Level 2: from a prompt to a donor's latents.

    vector -> nearest donors of the partition -> for each, best first:
        same meaning?  seed allowed?  score reaches a tier that is measured and not suspended?  latents there and whole?

The first candidate that passes serves.  A miss names what stopped the best one.
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np

from cache_actors.blob_store import BlobCorrupt, BlobMissing, BlobStore, Entry, EntryKey
from cache_actors.donor_index import DonorIndex
from cache_actors.embedder import BadVector, Embedder, Vector, checked
from cache_actors.latent_audit import Audit
from cache_actors.latent_calls import Answer, Lookup
from cache_actors.latent_config import ApproximateConfig, TextEncoderConfig
from cache_actors.latent_entries import BadLatents, EntryFacts, check_latents, latents_blob
from cache_actors.latent_report import CacheReport, Reason
from cache_actors.latent_shadow import ShadowWindows
from cache_actors.meaning import MEANING_VERSION, Meanings
from cache_actors.prompt_vectors import PromptVectors
from cache_actors.similarity_map import MapError, SimilarityMap, Tier, unmet_floor
from cache_actors.vector_index import IndexUnavailable, require_library, rescored

logger = logging.getLogger(__name__)


class SimilarDonors:
    """embedder: None when the configuration's is the text encoder, whose vectors come with each request.

    Raises MapError for a map of another embedder or guard, IndexUnavailable when so many entries need a library.
    """

    def __init__(
        self,
        config: ApproximateConfig,
        max_entries: int,
        similarity_map: SimilarityMap,
        embedder: Embedder | None,
        store: BlobStore,
        audit: Audit,
    ) -> None:
        self._config, self._map, self._store, self._audit = config, similarity_map, store, audit
        if isinstance(config.embedder, TextEncoderConfig):
            self._dim, self.fingerprint = config.embedder.dim, config.embedder.fingerprint
        elif embedder is None:
            raise ValueError("embedder: None, but the configuration names a folder; load it")
        else:
            self._dim, self.fingerprint = embedder.dim, embedder.fingerprint
        _check_map(similarity_map, self.fingerprint)
        require_library(max_entries)
        self._vectors = None if embedder is None else PromptVectors(embedder)
        self._index = DonorIndex(self._dim)
        self._meanings = Meanings(similarity_map.wordings)
        self.shadow = ShadowWindows(config.shadow_fraction, config.shadow_window, config.floors)
        self._unmet = {tier.skip_steps: unmet_floor(config.floors, tier.evidence) for tier in similarity_map.tiers}

    @property
    def steps(self) -> tuple[int, ...]:
        """Steps whose entering latents donors keep."""
        return self._map.steps

    def close(self) -> None:
        """End the embedder's thread."""
        if self._vectors is not None:
            self._vectors.close()

    def add(self, entry: Entry) -> None:
        """Take a stored donor into the index; one of another embedder serves nobody until it expires."""
        if entry.facts["embedder"] != self.fingerprint:
            return
        try:
            vector = np.frombuffer(self._store.read(entry.key, "vector", use=False)["vector"], np.float32)
        except (BlobMissing, BlobCorrupt):
            return  # gone, or in quarantine by now
        self._index.add(entry.key, vector)

    def remove(self, key: EntryKey) -> None:
        """An unknown key is no error."""
        self._index.remove(key)

    def vector(self, prompt: str, supplied: Vector | None, timeout_s: float | None) -> Vector:
        """[dim] of length 1.  Raises TimeoutError, BadVector, or what embedding raises."""
        if self._vectors is not None:
            return self._vectors.of(prompt, timeout_s)
        if supplied is None:
            raise BadVector("vector: none was sent; with embedder kind text_encoder every request brings its own")
        return checked(supplied, self._dim)

    def lookup(self, ask: Lookup) -> Answer:
        """A hit, or a miss whose report says why."""
        identity, config = ask.identity, self._config
        outside = self._map.scope.differs(identity)
        if outside and not config.experimental:
            detail = "the similarity map was measured on another " + ", ".join(outside)
            return _miss(Reason.UNQUALIFIED, detail=detail, differs=tuple(outside))
        if not identity.prompt:
            return _miss(Reason.EMPTY_PROMPT)
        try:
            vector = self.vector(identity.prompt, ask.vector, config.lookup_timeout_s)
            candidates = self._index.nearest(identity.partition(), vector, config.candidates)
        except TimeoutError:
            return _miss(Reason.LOOKUP_TIMEOUT, detail=f"no vector within {config.lookup_timeout_s} s")
        except BadVector as bad:
            return _miss(Reason.BAD_VECTOR, detail=str(bad))
        except IndexUnavailable as error:
            return _miss(Reason.INDEX_UNAVAILABLE, detail=str(error))
        except Exception as error:  # a plugged-in embedder may raise anything; no request may fail for it
            logger.exception("the prompt of job %s got no vector", ask.job_id)
            return _miss(Reason.ENCODER_ERROR, detail=repr(error))
        first: Answer | None = None
        for tried, candidate in enumerate(candidates, 1):
            answer = self._try(ask, candidate.key, vector, tried, bool(outside))
            if answer.report.decision == "hit":
                return answer
            first = first or answer
        if first is None:
            return _miss(Reason.NO_CANDIDATE)
        return Answer(first.report.model_copy(update={"candidates_tried": len(candidates)}))

    def _try(self, ask: Lookup, key: EntryKey, vector: Vector, tried: int, outside: bool) -> Answer:
        entry = self._store.get(key)
        if entry is None:
            self._index.remove(key)
            return _miss(Reason.BLOB_MISSING)
        facts, step, score = EntryFacts.model_validate(entry.facts), 0, 0.0
        try:
            stored = self._store.read(key, "vector", use=False)["vector"]
            score = rescored(vector, np.frombuffer(stored, np.float32))
            difference = self._meanings.difference(ask.identity.prompt, facts.prompt)
            if difference is not None:
                return _miss(Reason.GUARD_TERMS, detail=str(difference), similarity=score)
            if ask.seed_policy == "own" and not (ask.seed_given and facts.seed == ask.identity.seed):
                return _miss(Reason.SEED_MISMATCH, similarity=score)
            tier, reason, detail = self._tier(score, facts.steps)
            if tier is None:
                return _miss(reason, detail=detail, similarity=score)
            step = tier.skip_steps
            latents = self._store.read(key, latents_blob(step))[latents_blob(step)]
            check_latents(latents, ask.identity)
        except (BlobMissing, BlobCorrupt, BadLatents) as fault:
            if isinstance(fault, BadLatents):
                self._store.condemn(key)
            self._audit.write(
                "kv_missing_after_vector_hit",
                ask.where,
                cache_id=key.name,
                skip_step=step,
                similarity=score,
                rerank_score=score,  # of the log's first format: no second scorer ran
                detail=str(fault),
            )
            return _miss(Reason(fault.reason) if isinstance(fault, BlobMissing) else Reason.CORRUPT)
        report = CacheReport(
            decision="hit",
            level=2,
            donor=key.name,
            similarity=score,
            skipped_steps=tier.skip_steps,
            candidates_tried=tried,
            seed_used=facts.seed,
            derived_depth=facts.derived_depth + 1,
            shadow=self.shadow.chosen(ask.request_id),
            experimental=outside or self._unmet[tier.skip_steps] is not None,
        )
        return Answer(report, tier.skip_steps, {"latents": latents})

    def _tier(self, score: float, steps: tuple[int, ...]) -> tuple[Tier | None, Reason, str | None]:
        """The deepest tier that may serve; else None and what stopped the last one looked at."""
        reached = self._map.tiers_for(score)
        if not reached:
            return None, Reason.BELOW_THRESHOLD, f"the lowest tier begins at {self._map.tiers[0].min_score}"
        reason, detail = Reason.NO_USABLE_STEP, None
        for tier in reached:
            unmet = self._unmet[tier.skip_steps]
            if unmet is not None and not self._config.experimental:
                reason, detail = Reason.UNQUALIFIED, unmet
            elif tier.skip_steps in self.shadow.suspended:
                reason, detail = Reason.TIER_SUSPENDED, f"shadow runs of {tier.skip_steps} steps fell under the floor"
            elif tier.skip_steps in steps:
                return tier, reason, None
            else:
                reason, detail = Reason.NO_USABLE_STEP, f"the donor keeps steps {list(steps)}"
        return None, reason, detail

    def stats(self) -> dict[str, Any]:
        """Plain numbers."""
        return {
            "donors": len(self._index),
            "index_bytes": self._index.memory_bytes,
            "shadow_ssim": {str(steps): mean for steps, mean in self.shadow.means().items()},
            "suspended_tiers": sorted(self.shadow.suspended),
        }


def _miss(reason: Reason, **fields: Any) -> Answer:
    return Answer(CacheReport.model_validate({"decision": "miss", "reason": reason, **fields}))


def _check_map(similarity_map: SimilarityMap, fingerprint: str) -> None:
    if similarity_map.embedder != fingerprint:
        raise MapError(
            f"similarity_map: measured with embedder {similarity_map.embedder[:12]}, served is {fingerprint[:12]}; "
            "calibrate again or name the embedder it was made with"
        )
    if similarity_map.meaning != MEANING_VERSION:
        raise MapError(
            f"similarity_map: judged by guard version {similarity_map.meaning}, this program has {MEANING_VERSION}; "
            "calibrate again"
        )
