"""Noise that is a pure function of (seed, chunk, draw): no generator state to save, burn or restore.

Philox is counter-based: the key alone fixes the whole stream.  Numbers are drawn on the CPU by numpy's ziggurat, plain
scalar code, so every device and every CPU starts from the same bits; torch's CPU generator vectorises its normal draw
differently on different processors.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

NOISE_VERSION = 1
"""Part of every world key: other noise for the same seed is another world."""

SEED_BITS = 63


def chunk_noise(seed: int, chunk: int, draw: int, shape: Sequence[int]) -> Tensor:
    """Standard normal fp32 noise on the CPU.

    seed: 0 to 2**63 - 1.  draw: 0 is the noise a chunk starts from, 1, 2, ... re-noise it after each step.
    """
    if not 0 <= seed < 1 << SEED_BITS:
        raise ValueError(f"seed: got {seed}, expected 0 to {(1 << SEED_BITS) - 1}")
    name = f"worldstage noise {NOISE_VERSION} {seed} {chunk} {draw}".encode()
    key = np.frombuffer(hashlib.sha256(name).digest()[:16], dtype="<u8")
    generator = np.random.Generator(np.random.Philox(key=key))
    return torch.from_numpy(generator.standard_normal(tuple(shape), dtype=np.float32))
