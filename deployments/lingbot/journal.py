"""What a world is made of: each chunk's controls and final latents.  All else is rebuilt from them exactly."""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from deployments.lingbot.controls import ChunkControls


class JournalError(ValueError):
    """Bytes that are no journal entry, or one of another version."""


@dataclass(frozen=True, eq=False)
class JournalEntry:
    """One chunk."""

    controls: ChunkControls
    latents: Tensor
    """[1, C, c, h, w] fp32 on the CPU, exactly what the clean pass reads."""

    def to_bytes(self) -> bytes:
        """A safetensors file; `from_bytes` is the inverse."""
        controls = base64.b64encode(self.controls.canonical()).decode()
        return save({"latents": self.latents.contiguous()}, {"controls": controls})

    @classmethod
    def from_bytes(cls, data: bytes) -> JournalEntry:
        """Raises JournalError."""
        try:
            latents = load(data)["latents"]
            header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]
            controls = ChunkControls.from_canonical(base64.b64decode(header["controls"], validate=True))
        except (SafetensorError, LookupError, TypeError, ValueError) as error:
            raise JournalError(f"journal entry of {len(data)} bytes: cannot be read: {error}") from error
        if latents.dtype != torch.float32 or latents.ndim != 5:
            raise JournalError(
                f"journal entry: got latents {list(latents.shape)} {latents.dtype}, expected 5 axes, fp32"
            )
        return cls(controls, latents)
