"""Prompt to embeddings, once a request, by diffusers' own `WanPipeline.encode_prompt`."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypedDict

import numpy as np
import ray
import torch
from diffusers import WanPipeline
from numpy.typing import NDArray
from safetensors.torch import save
from torch import Tensor
from transformers import AutoTokenizer, UMT5EncoderModel

from deployments.plan import Branch
from deployments.wan.free_memory import free_memory
from deployments.wan.memory_plan import MemoryPlan


class TextEncoder:
    """UMT5 and its tokenizer.

    folder: a Diffusers-layout checkpoint with ``text_encoder`` and ``tokenizer``.
    """

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
        encoder = UMT5EncoderModel.from_pretrained(folder / "text_encoder", dtype=dtype).to(device).eval()
        tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
        self._pipeline = WanPipeline(tokenizer=tokenizer, text_encoder=encoder, vae=None, scheduler=None)
        self._dtype, self._device = dtype, device

    @torch.inference_mode()
    def encode(self, prompt: str, negative_prompt: str | None, max_sequence_length: int) -> dict[Branch, Tensor]:
        """Embeddings of each branch, [1, max_sequence_length, text_dim] on the CPU, zero beyond the prompt's tokens.

        negative_prompt: None leaves the negative branch out.  Longer prompts are cut at max_sequence_length tokens.
        """
        positive, negative = self._pipeline.encode_prompt(
            prompt,
            negative_prompt,
            do_classifier_free_guidance=negative_prompt is not None,
            max_sequence_length=max_sequence_length,
            device=self._device,
            dtype=self._dtype,
        )
        out: dict[Branch, Tensor] = {"positive": positive.cpu()}
        if negative is not None:
            out["negative"] = negative.cpu()
        return out


class Encoded(TypedDict):
    """Reply of `TextEncoderReplica.encode`."""

    blob: list[ray.ObjectRef]
    """One reference to a safetensors blob with ``text.<branch>``; in a list so that it travels as a reference."""
    seconds: float


class TextEncoderReplica:
    """The Serve replica of a `TextEncoder`; torch runs on a thread of its own, so that health checks are answered."""

    def __init__(self, folder: Path, dtype: torch.dtype, on_gpu: bool, threads: int, memory: MemoryPlan) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="text-encoder")
        device = torch.device("cuda" if on_gpu else "cpu")

        def load() -> TextEncoder:
            torch.set_num_threads(threads)
            if on_gpu:
                memory.refuse_if_too_big({"text encoder": free_memory(device)})
            return TextEncoder(folder, dtype, device)

        self._encoder = self._thread.submit(load).result()

    async def encode(self, prompt: str, negative_prompt: str | None, max_sequence_length: int) -> Encoded:
        """As `TextEncoder.encode`, the embeddings by reference."""
        began = time.perf_counter()
        loop = asyncio.get_running_loop()
        text = await loop.run_in_executor(
            self._thread, self._encoder.encode, prompt, negative_prompt, max_sequence_length
        )
        blob = save({f"text.{branch}": x.contiguous() for branch, x in text.items()})
        return Encoded(blob=[ray.put(blob)], seconds=time.perf_counter() - began)

    async def pooled(self, prompt: str, max_sequence_length: int) -> NDArray[np.float32]:
        """[text_dim] of length 1: the mean of the prompt's own states, for the latent cache to tell similar prompts."""
        from cache_actors.embedder import pool_text_states  # here: a server without that cache imports nothing of it

        loop = asyncio.get_running_loop()
        text = await loop.run_in_executor(self._thread, self._encoder.encode, prompt, None, max_sequence_length)
        return pool_text_states(text["positive"])
