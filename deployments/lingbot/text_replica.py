"""Prompts of worlds to embeddings, once a prompt, as a Serve deployment."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from safetensors.torch import save

from deployments.lingbot.process_name import process_name
from deployments.lingbot.text_encoder import WorldTextEncoder


class WorldTextReplica:
    """Holds the text encoder; torch runs on a thread of its own, so that health checks are answered.

    folder: of the release that holds the encoder.  max_tokens: longer prompts are cut there.
    """

    def __init__(self, folder: Path, max_tokens: int, dtype: torch.dtype, on_gpu: bool, threads: int) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="world-text")
        device = torch.device("cuda" if on_gpu else "cpu")

        def load() -> WorldTextEncoder:
            torch.set_num_threads(threads)
            return WorldTextEncoder(folder, max_tokens, dtype, device)

        self._encoder = self._thread.submit(load).result()
        self._device = process_name(device, threads)

    async def device(self) -> str:
        """As `process_name` gives it."""
        return self._device

    async def encode(self, prompt: str) -> bytes:
        """A safetensors blob with ``text`` [n, text_dim] of a cleaned prompt."""
        text = await asyncio.get_running_loop().run_in_executor(self._thread, self._encoder.encode, prompt)
        return save({"text": text.contiguous()})
