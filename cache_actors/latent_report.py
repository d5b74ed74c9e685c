"""What every response says about the latent cache, and the words for it.  Imports nothing of the cache itself."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

from pydantic import Field

from cache_actors.closed import Closed

Word = Literal["off", "exact", "approximate", "refresh"]
"""A request's wish: exact is levels 0 and 1, approximate adds 2; refresh computes anew and replaces what is stored."""


class Reason(StrEnum):
    """Why there was no hit; the whole list."""

    DISABLED = "disabled"
    """The server has no latent cache or its mode is off."""
    BYPASS_REQUEST = "bypass_request"
    """The request said off or refresh."""
    WRITE_ONLY = "write_only"
    NO_SEED = "no_seed"
    """No seed was sent, which asks for a new video."""
    NO_CANDIDATE = "no_candidate"
    """Nothing stored fits."""
    INCOMPATIBLE = "incompatible"
    """This very prompt is stored, for requests that differ in the fields named by `differs`."""
    SEED_MISMATCH = "seed_mismatch"
    """A similar prompt is stored with another seed; `seed_policy: donor` would take it."""
    GUARD_TERMS = "guard_terms"
    """A similar prompt is stored, but it means something else: `detail` says what."""
    BELOW_THRESHOLD = "below_threshold"
    NO_USABLE_STEP = "no_usable_step"
    """The donor lacks the latents of every step that its score allows."""
    UNQUALIFIED = "unqualified"
    """No measured error bound covers this request or tier."""
    TIER_SUSPENDED = "tier_suspended"
    """Shadow runs fell under the floor."""
    EMPTY_PROMPT = "empty_prompt"
    BAD_VECTOR = "bad_vector"
    ENCODER_ERROR = "encoder_error"
    INDEX_UNAVAILABLE = "index_unavailable"
    LOOKUP_TIMEOUT = "lookup_timeout"
    BLOB_MISSING = "blob_missing"
    CORRUPT = "corrupt"
    EXPIRED = "expired"
    WARMING = "warming"
    """Entries are still being read after a start."""


class CacheReport(Closed):
    """The `cache` object of a job."""

    decision: Literal["hit", "miss", "bypass", "disabled", "error"]
    level: Literal[0, 1, 2] | None = None
    donor: str | None = Field(None, description="Entry of the same tenant whose work is reused.")
    similarity: float | None = Field(None, description="Cosine of the prompts; the best one seen on a miss.")
    skipped_steps: int = Field(0, description="Solver steps that are not run.")
    saved_steps: tuple[int, ...] = Field((), description="Steps whose latents this request stored.")
    reason: Reason | None = Field(None, description="None on a hit.")
    detail: str | None = Field(None, description="What the reason speaks of, in words.")
    differs: tuple[str, ...] = ()
    lookup_ms: float = 0.0
    candidates_tried: int = 0
    seed_used: int | None = Field(None, description="Seed behind the initial noise; on level 2 the donor's.")
    derived_depth: int = Field(0, description="Level-2 hits behind this video; 0 was computed from noise.")
    shadow: bool = Field(False, description="The hit was not served: the cold result was, and both were compared.")
    experimental: bool = Field(False, description="Served without a qualified error bound, as the operator allowed.")
