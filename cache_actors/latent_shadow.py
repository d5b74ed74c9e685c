"""Shadow runs: would-be level-2 hits that were computed cold and compared.  Bookkeeping alone."""

from __future__ import annotations

import hashlib
from collections import deque

from pydantic import Field

from cache_actors.closed import Closed
from cache_actors.latent_config import Floors


class ShadowResult(Closed):
    """One comparison: the cold video was served, the one from the donor's latents was measured against it."""

    request_id: str
    job_id: str
    tenant: str
    partition: str
    donor: str
    similarity: float
    skip_steps: int = Field(ge=1)
    ssim: float
    psnr_db: float | None = Field(description="None for equal videos.")
    temporal_error: float


class ShadowWindows:
    """The latest results of each tier; a tier whose mean SSIM falls under the floor is suspended until a restart."""

    def __init__(self, fraction: float, window: int, floors: Floors) -> None:
        self._fraction, self._window, self._floors = fraction, window, floors
        self._ssim: dict[int, deque[float]] = {}
        self.suspended: set[int] = set()
        """Skipped steps of tiers that serve no more."""

    def chosen(self, request_id: str) -> bool:
        """Whether this hit runs in the shadow: a fixed part of all, the same at every try."""
        share = int.from_bytes(hashlib.sha256(request_id.encode()).digest()[:8], "big") / 2**64
        return share < self._fraction

    def record(self, result: ShadowResult) -> bool:
        """True when this result suspends its tier."""
        tier = self._ssim.setdefault(result.skip_steps, deque(maxlen=self._window))
        tier.append(result.ssim)
        bad = len(tier) == self._window and sum(tier) / len(tier) < self._floors.ssim_mean
        if not bad or result.skip_steps in self.suspended:
            return False
        self.suspended.add(result.skip_steps)
        return True

    def means(self) -> dict[int, float]:
        """Mean SSIM of each tier's window, by skipped steps."""
        return {steps: sum(tier) / len(tier) for steps, tier in self._ssim.items()}
