"""The served text encoder's own pooled states as an embedder, as with `embedder.kind: text_encoder` in the config."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from cache_actors.embedder import Vector, pool_text_states
from deployments.stage_cache.closed import digest_of
from deployments.wan.checkpoint import WanCheckpoint, fingerprint
from deployments.wan.text_encoder import TextEncoder


class TextStates:
    """Implements `Embedder`.  max_sequence_length: of the requests; longer prompts are cut there."""

    def __init__(
        self, checkpoint: WanCheckpoint, dtype: torch.dtype, device: torch.device, max_sequence_length: int
    ) -> None:
        self._encoder = TextEncoder(checkpoint.folder, dtype, device)
        self._length = max_sequence_length
        self.dim = int(self._one("a").shape[0])
        self.fingerprint = digest_of(
            {"weights": fingerprint(checkpoint), "dtype": str(dtype), "max_sequence_length": max_sequence_length}
        )

    def embed(self, texts: Sequence[str]) -> Vector:
        """[len(texts), dim]."""
        return np.stack([self._one(text) for text in texts])

    def _one(self, text: str) -> Vector:
        return pool_text_states(self._encoder.encode(text, None, self._length)["positive"])
