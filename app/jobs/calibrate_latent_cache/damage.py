"""What a level-2 hit costs: resumed from a donor's latents, against the same prompt cold from the donor's noise.

Both start from one seed, so the comparison measures damage and not layout.  A tier is served with the error of all
pairs whose score reaches it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from app.quality import psnr, ssim, temporal_error
from cache_actors.latent_config import Floors
from cache_actors.similarity_map import Evidence, Tier, unmet_floor

BOOTSTRAP_DRAWS = 2000
_EQUAL_DB = 100.0
"""Stands for the PSNR of equal videos, which is infinite: above what 8 bits can tell apart."""

Frames = NDArray[np.uint8]
"""[F, H, W, 3] RGB."""


class VideoGenerator(Protocol):
    """Makes videos of one model with one set of settings."""

    def cold(self, prompt: str, seed: int, keep: Collection[int]) -> tuple[Frames, Mapping[int, object]]:
        """Frames from noise, and what enters each step of `keep`, fit for `resumed`."""

    def resumed(self, prompt: str, step: int, latents: object) -> Frames:
        """Frames from another run's latents entering `step`, the solver's order restarted."""


@dataclass(frozen=True)
class Damage:
    """One pair at one step."""

    score: float
    skip_steps: int
    ssim: float
    psnr_db: float
    temporal_error: float


def measure(
    generator: VideoGenerator, pairs: Sequence[tuple[str, str, float]], steps: Sequence[int], seed: int
) -> list[Damage]:
    """pairs: (query, donor, score), of equal meaning.  Pair i runs with seed + i."""
    found = []
    for i, (query, donor, score) in enumerate(pairs):
        _, donated = generator.cold(donor, seed + i, steps)
        cold = generator.cold(query, seed + i, ())[0] / 255.0
        for step in steps:
            warm = generator.resumed(query, step, donated[step]) / 255.0
            decibels = min(psnr(cold, warm), _EQUAL_DB)
            found.append(Damage(score, step, ssim(cold, warm), decibels, temporal_error(cold, warm)))
    return found


def evidence(damage: Sequence[Damage], date: str, code: str) -> Evidence:
    """Of the given measurements, all of one step; the bound is the 2.5 % quantile of bootstrapped means."""
    values = np.array([d.ssim for d in damage])
    draws = np.random.default_rng(0).choice(values, (BOOTSTRAP_DRAWS, len(values)))
    return Evidence(
        pairs=len(damage),
        ssim_mean=float(values.mean()),
        ssim_min=float(values.min()),
        ssim_mean_lower=float(np.quantile(draws.mean(1), 0.025)),
        psnr_mean_db=float(np.mean([d.psnr_db for d in damage])),
        temporal_error_mean=float(np.mean([d.temporal_error for d in damage])),
        temporal_error_max=max(d.temporal_error for d in damage),
        date=date,
        code=code,
    )


def tiers(
    damage: Sequence[Damage], lowest: float, edges: Sequence[float], floors: Floors, date: str, code: str
) -> list[Tier]:
    """For each step the lowest edge from which all floors are met; deeper steps need a higher edge.

    lowest: threshold of the map, the first edge.  Where no step meets the floors, the least harmful one stands alone,
    with its honest evidence: a server refuses it unless it is told to experiment.
    """
    steps = sorted({d.skip_steps for d in damage})
    candidates = [lowest, *sorted(edge for edge in edges if edge > lowest)]
    found: list[Tier] = []
    for step in steps:
        for edge in candidates:
            at = [d for d in damage if d.skip_steps == step and d.score >= edge]
            if not at:
                continue
            proof = evidence(at, date, code)
            if unmet_floor(floors, proof) is None:
                while found and found[-1].min_score >= edge:
                    found.pop()  # a deeper step is as good from there on
                found.append(Tier(min_score=edge, skip_steps=step, evidence=proof))
                break
    if found:
        return found
    at = [d for d in damage if d.skip_steps == steps[0] and d.score >= lowest] or list(damage)
    return [Tier(min_score=lowest, skip_steps=steps[0], evidence=evidence(at, date, code))]
