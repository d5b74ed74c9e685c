"""Which pairs would be taken for the same video, at which score, and how often rightly."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from app.jobs.calibrate_latent_cache.labelled_pairs import LabelledPair
from cache_actors.embedder import Embedder, Vector
from cache_actors.meaning import Meanings, Wordings
from cache_actors.similarity_map import JudgedPairs

_BATCH = 64


@dataclass(frozen=True)
class JudgedPair:
    """A pair, its cosine, and what the guard said: None lets it pass."""

    pair: LabelledPair
    score: float
    veto: str | None

    def serves(self, min_score: float) -> bool:
        """Equal in meaning, and found so."""
        return self.pair.same and self.veto is None and self.score >= min_score


@dataclass(frozen=True)
class Judgement:
    """All judged pairs, and by what they were judged."""

    embedder: str
    meaning: int
    wordings: Wordings
    pairs: list[JudgedPair]


def judge(pairs: Sequence[LabelledPair], embedder: Embedder, wordings: Wordings) -> list[JudgedPair]:
    """In the order given.  Equal texts are embedded once."""
    texts = list(dict.fromkeys(text for pair in pairs for text in (pair.query, pair.donor)))
    vectors: dict[str, Vector] = {}
    for start in range(0, len(texts), _BATCH):
        batch = texts[start : start + _BATCH]
        vectors |= dict(zip(batch, embedder.embed(batch), strict=True))
    meanings = Meanings(wordings)
    judged = []
    for pair in pairs:
        difference = meanings.difference(pair.query, pair.donor)
        score = float(vectors[pair.query] @ vectors[pair.donor])
        judged.append(JudgedPair(pair, score, None if difference is None else str(difference)))
    return judged


def rates(judged: Sequence[JudgedPair], min_score: float) -> JudgedPairs:
    """Counts at a threshold, the guard included."""
    taken = [j for j in judged if j.veto is None and j.score >= min_score]
    return JudgedPairs(
        same=sum(j.pair.same for j in judged),
        different=sum(not j.pair.same for j in judged),
        accepted_same=sum(j.pair.same for j in taken),
        accepted_different=sum(not j.pair.same for j in taken),
    )


def threshold(judged: Sequence[JudgedPair], kept: float = 0.95) -> float:
    """The lowest score to serve: just under `kept` of the equal pairs that pass the guard, and above every pair that
    passes it wrongly.  Rounded to 0.01; 1.0 when nothing may pass.

    The guard decides; the threshold keeps out what the map has no paraphrases to speak for.
    """
    right = sorted(j.score for j in judged if j.veto is None and j.pair.same)
    if not right:
        return 1.0
    wanted = math.floor(right[int(len(right) * (1 - kept))] * 100) / 100
    wrong = [j.score for j in judged if j.veto is None and not j.pair.same]
    needed = math.floor(max(wrong) * 100 + 1) / 100 if wrong else 0.0
    return min(1.0, max(wanted, needed, 0.01))
