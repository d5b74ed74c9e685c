"""Requests, payloads and a made-up embedder for tests of the latent cache; no torch, no Ray."""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cache_actors.embedder import Vector, unit
from cache_actors.latent_cache import LatentCache
from cache_actors.latent_calls import Answer, Lookup, Save
from cache_actors.latent_config import ApproximateConfig, LatentCacheConfig
from cache_actors.latent_key import LatentIdentity, ServedModel
from cache_actors.latent_report import CacheReport
from cache_actors.meaning import MEANING_VERSION
from cache_actors.similarity_map import Evidence, JudgedPairs, Scope, SimilarityMap, Tier

SHAPE = (1, 2, 2, 4, 4)
STEPS = 20
SERVED = ServedModel(
    weights="a" * 64,
    task="t2v",
    scheduler="UniPCMultistepScheduler",
    scheduler_config="b" * 64,
    boundary_ratio=None,
    loras=(),
    dtype="float32",
    quantization=None,
    latent_dtype="float32",
    step_profile=None,
    decoder="c",
    numerics="cpu",
)
REPORT = CacheReport(decision="miss")
"""Of a request that computed everything."""


def identity(prompt: str = "a red ball moves left", seed: int = 1, **changes: Any) -> LatentIdentity:
    params = {
        "prompt": prompt,
        "negative_prompt": "",
        "width": 32,
        "height": 32,
        "num_frames": 5,
        "fps": 8,
        "num_inference_steps": STEPS,
        "guidance_scale": 5.0,
        "guidance_scale_2": None,
        "flow_shift": 3.0,
        "seed": seed,
        "max_sequence_length": 64,
        "outputs": (),
    }
    made = LatentIdentity.of(
        params,
        SERVED,
        tenant="team",
        latent_shape=SHAPE,
        timesteps=tuple(float(1000 - i) for i in range(STEPS)),
        sigmas=tuple(1 - i / STEPS for i in range(STEPS + 1)),
        reused_steps=(),
        clean=str.strip,
    )
    return LatentIdentity.model_validate({**made.model_dump(), **changes})


def latents(fill: float = 0.0, shape: tuple[int, ...] = SHAPE) -> bytes:
    """A safetensors file with one fp32 tensor `latents`."""
    data = np.full(shape, fill, np.float32).tobytes()
    header = json.dumps({"latents": {"dtype": "F32", "shape": shape, "data_offsets": [0, len(data)]}}).encode()
    return len(header).to_bytes(8, "little") + header + data


class WordEmbedder:
    """A vector for each word, summed: prompts that share words are near each other."""

    dim = 64
    fingerprint = "words"

    def __init__(self) -> None:
        self.asked: list[str] = []

    def embed(self, texts: Sequence[str]) -> Vector:
        self.asked += texts
        return unit(np.stack([self._one(text) for text in texts]))

    def _one(self, text: str) -> Vector:
        words = [np.random.default_rng(zlib.crc32(w.encode())).standard_normal(self.dim) for w in text.lower().split()]
        return np.sum(words, axis=0).astype(np.float32)


def tier(min_score: float, skip: int, ssim: float = 0.97, pairs: int = 36) -> Tier:
    evidence = Evidence(
        pairs=pairs,
        ssim_mean=ssim,
        ssim_min=ssim - 0.02,
        ssim_mean_lower=ssim - 0.005,
        psnr_mean_db=35.0,
        temporal_error_mean=0.1,
        temporal_error_max=0.2,
        date="2026-01-01",
        code="test",
    )
    return Tier(min_score=min_score, skip_steps=skip, evidence=evidence)


def similarity_map(*tiers: Tier, **changes: Any) -> SimilarityMap:
    of = identity()
    scope = Scope.model_validate({name: getattr(of, name) for name in Scope.model_fields})
    return SimilarityMap(
        format=1,
        scope=scope,
        embedder="words",
        meaning=MEANING_VERSION,
        wordings=(),
        tiers=tiers or (tier(0.6, 3), tier(0.9, 6)),
        pairs=JudgedPairs(same=1, different=1, accepted_same=1, accepted_different=0),
    ).model_copy(update=changes)


def config(root: Path, approximate: dict[str, Any] | None = None, **changes: Any) -> LatentCacheConfig:
    level_2 = None if approximate is None else ApproximateConfig(similarity_map="unread", **approximate)
    return LatentCacheConfig.model_validate({"root": str(root), "approximate": level_2, "budget_gib": 0.01, **changes})


def opened(root: Path, approximate: dict[str, Any] | None = None, **changes: Any) -> LatentCache:
    """A warm cache; with `approximate`, also level 2 on `similarity_map()` and a `WordEmbedder`."""
    extra = {name: changes.pop(name) for name in ("similarity_map", "embedder", "clock") if name in changes}
    if approximate is not None:
        extra = {"similarity_map": similarity_map(), "embedder": WordEmbedder(), **extra}
    cache = LatentCache(config(root, approximate, **changes), **extra)
    cache.warm()
    return cache


def ask(cache: LatentCache, of: LatentIdentity, word: str = "exact", **changes: Any) -> Answer:
    given = {"seed_given": True, "request_id": "req", "job_id": "job", **changes}
    return cache.lookup(Lookup(of, word, **given))


def save(cache: LatentCache, of: LatentIdentity, **changes: Any) -> bool:
    """Store all levels and wait for the disk."""
    given = {
        "request_id": "req",
        "job_id": "job",
        "report": REPORT,
        "word": "exact",
        "files": {"video.mp4": b"mp4"},
        "state": (10, latents(10)),
        "donors": {3: latents(3), 6: latents(6)},
        "gpu_seconds": 10.0,
        **changes,
    }
    accepted = cache.offer(Save(of, **given))
    assert cache.flush(20)
    return accepted


def audit(root: Path) -> list[dict[str, Any]]:
    path = root / "audit" / "audit.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
