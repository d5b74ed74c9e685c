"""Digests of what must be the same bits wherever and however it was computed."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from app.jobs.local_world import LocalWorld, LocalWorldModel


def digest(tensor: Tensor) -> str:
    """SHA-256 (hex) of dtype, shape and bytes."""
    data = tensor.detach().cpu().contiguous()
    out = hashlib.sha256(f"{data.dtype}{tuple(data.shape)}".encode())
    out.update(data.flatten().view(torch.uint8).numpy().data)
    return out.hexdigest()


def latents(world: LocalWorld, chunks: range) -> list[str]:
    """Of a world's journal."""
    return [digest(world.journal[chunk].latents) for chunk in chunks]


def keys_and_values(model: LocalWorldModel, world: LocalWorld, chunks: Sequence[int]) -> list[str]:
    """Of what rank 0 keeps of a world's chunks; empty strings where it keeps nothing."""
    blobs = [model.gang.blob(key) for key in world.keys]
    return ["" if (blob := blobs[chunk]) is None else digest(blob) for chunk in chunks]
