"""What a driver asks of the latent cache, what it is answered, and what it offers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from cache_actors.latent_key import LatentIdentity
from cache_actors.latent_report import CacheReport, Word


class _Asked:
    identity: LatentIdentity
    request_id: str
    job_id: str

    @property
    def where(self) -> dict[str, str]:
        """What every audit line about it says."""
        return {
            "request_id": self.request_id,
            "job_id": self.job_id,
            "tenant": self.identity.tenant,
            "partition": self.identity.partition(),
        }


@dataclass(frozen=True)
class Lookup(_Asked):
    """One question.  Asked before planning."""

    identity: LatentIdentity
    word: Word
    request_id: str
    job_id: str
    seed_given: bool
    """False: the seed was drawn, so the request wants a new video."""
    seed_policy: Literal["own", "donor"] = "own"
    """donor: a similar prompt's initial noise will do."""
    vector: NDArray[np.float32] | None = None
    """[dim], the pooled text states, for a cache whose embedder is the text encoder."""


@dataclass(frozen=True)
class Answer:
    """What to do.  On a hit `blobs` holds, by level: 0 the result files; 1 `state`; 2 `latents`."""

    report: CacheReport
    step: int = 0
    """First step to compute."""
    blobs: Mapping[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True)
class Save(_Asked):
    """What one finished, failed or cancelled request leaves.  Offered after the response's path."""

    identity: LatentIdentity
    request_id: str
    job_id: str
    report: CacheReport
    """As `lookup` gave it: provenance."""
    word: Word
    files: Mapping[str, bytes] | None = None
    """The result, for level 0; None where it is not whole."""
    state: tuple[int, bytes] | None = None
    """Step and `SolverState.to_bytes`, for level 1."""
    donors: Mapping[int, bytes] = field(default_factory=dict)
    """Latents entering a step, each a safetensors file with one tensor `latents`, for level 2."""
    gpu_seconds: float = 0.0
    vector: NDArray[np.float32] | None = None
    """As in `Lookup`."""

    @property
    def size(self) -> int:
        """Bytes of all payloads."""
        state = len(self.state[1]) if self.state else 0
        return sum(map(len, (self.files or {}).values())) + state + sum(map(len, self.donors.values()))
