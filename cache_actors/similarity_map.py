"""The served map from similarity to skipped steps, with the measured error of each tier: a file of the calibrate job.

    { "format": 1,
      "scope":    what it was measured on: the partition fields that must be equal for it to speak,
      "embedder": fingerprint, "meaning": version of the guard, "wordings": the model's own synonyms,
      "tiers":    [ {"min_score": 0.90, "skip_steps": 5, "evidence": {...}}, ... ]  scores and steps rise together,
      "pairs":    what was judged: counts, precision, recall }

Below the lowest tier nothing is skipped; a higher score never skips less.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError, model_validator

from cache_actors.closed import Closed, Sha256
from cache_actors.latent_config import Floors
from cache_actors.latent_key import LatentIdentity

COMPUTED_SHARE = 0.6
"""At least this part of the steps is always computed."""


class MapError(ValueError):
    """A map that cannot be served."""


class Evidence(Closed):
    """Resumed from the donor's latents against a cold run of the same prompt from the donor's initial noise."""

    pairs: int = Field(ge=1)
    ssim_mean: float
    ssim_min: float
    ssim_mean_lower: float = Field(description="Lower end of a 95 % bootstrap interval of the mean.")
    psnr_mean_db: float
    temporal_error_mean: float
    temporal_error_max: float
    date: str
    code: str = Field(description="Commit or version that measured.")


class Tier(Closed):
    """Scores from `min_score` up skip `skip_steps` steps."""

    min_score: float = Field(gt=0, le=1)
    skip_steps: int = Field(ge=1)
    evidence: Evidence


class Scope(Closed):
    """What the map was measured on."""

    weights: Sha256
    width: int
    height: int
    num_frames: int
    num_inference_steps: int
    scheduler: str
    flow_shift: float
    guidance_scale: float
    guidance_scale_2: float | None
    max_sequence_length: int
    dtype: str
    step_profile: str | None

    def differs(self, identity: LatentIdentity) -> list[str]:
        """Fields in which a request is something else."""
        return [name for name, value in self if getattr(identity, name) != value]


class JudgedPairs(Closed):
    """Labelled prompt pairs at this map's lowest tier."""

    same: int
    different: int
    accepted_same: int
    accepted_different: int

    @property
    def precision(self) -> float:
        """1.0 when nothing was accepted."""
        accepted = self.accepted_same + self.accepted_different
        return self.accepted_same / accepted if accepted else 1.0

    @property
    def recall(self) -> float:
        """Share of equal meanings that would be hits."""
        return self.accepted_same / self.same if self.same else 0.0


class SimilarityMap(Closed):
    """The whole file."""

    format: Literal[1]
    scope: Scope
    embedder: str
    meaning: int
    wordings: tuple[tuple[str, ...], ...]
    tiers: tuple[Tier, ...] = Field(min_length=1)
    pairs: JudgedPairs

    @model_validator(mode="after")
    def _tiers_rise(self) -> SimilarityMap:
        for lower, higher in zip(self.tiers, self.tiers[1:], strict=False):
            if lower.min_score >= higher.min_score or lower.skip_steps >= higher.skip_steps:
                raise ValueError(
                    f"tiers: {lower.min_score} -> {lower.skip_steps} then {higher.min_score} -> {higher.skip_steps}; "
                    "min_score and skip_steps must both rise"
                )
        most = self.tiers[-1].skip_steps
        allowed = int(self.scope.num_inference_steps * (1 - COMPUTED_SHARE) + 1e-9)
        if most > allowed:
            raise ValueError(
                f"tiers: skip_steps {most} of {self.scope.num_inference_steps} steps; at most {allowed}, as "
                f"{COMPUTED_SHARE:.0%} are always computed"
            )
        return self

    @property
    def steps(self) -> tuple[int, ...]:
        """Steps whose latents donors must keep, rising."""
        return tuple(tier.skip_steps for tier in self.tiers)

    def tiers_for(self, score: float) -> tuple[Tier, ...]:
        """Tiers that a score reaches, deepest first; empty below the lowest."""
        return tuple(tier for tier in reversed(self.tiers) if score >= tier.min_score)


def unmet_floor(floors: Floors, evidence: Evidence) -> str | None:
    """Which floor a tier misses, None when it meets all."""
    if evidence.pairs < floors.pairs:
        return f"{evidence.pairs} pairs, the floor is {floors.pairs}"
    if evidence.ssim_mean_lower < floors.ssim_mean:
        return f"mean SSIM at least {evidence.ssim_mean_lower:.4f}, the floor is {floors.ssim_mean}"
    if evidence.psnr_mean_db < floors.psnr_mean_db:
        return f"mean PSNR {evidence.psnr_mean_db:.2f} dB, the floor is {floors.psnr_mean_db}"
    return None


def load_map(path: Path) -> SimilarityMap:
    """Raises MapError for a file that is absent or no map."""
    try:
        return SimilarityMap.model_validate_json(path.read_bytes())
    except OSError as error:
        raise MapError(
            f"similarity_map: {path} cannot be read: {error}; make it with calibrate_latent_cache"
        ) from error
    except ValidationError as error:
        raise MapError(f"similarity_map: {path} is no map: {error}; make it with calibrate_latent_cache") from error
