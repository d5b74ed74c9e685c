"""What a worker process of the calibration holds: stages, decoder, prompt embeddings, native videos."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from app.jobs.calibrate.stage_chain import Prepared, StageChain
from app.jobs.clip_settings import ClipSettings
from app.jobs.prompt_set import Video
from app.jobs.video_pair import Frames
from deployments.plan import Branch
from deployments.stage_cache.skip_schedule import Schedule
from deployments.wan.checkpoint import WanCheckpoint, open_checkpoint
from deployments.wan.decoder import VideoDecoder
from deployments.wan.memory_plan import DTYPES
from deployments.wan.text_encoder import TextEncoder

TEXTS = "texts.safetensors"
NATIVE = "native"
CACHED = "cached"


@dataclass(frozen=True)
class StudioSpec:
    """Picklable.  threads: torch threads on a CPU; 1 gives the bits of a gang whose ranks have one thread."""

    checkpoint: str
    revision: str | None
    dtype: Literal["float32", "bfloat16"]
    on_gpu: bool
    clip: ClipSettings
    run: Path
    """Folder of the calibration run."""
    threads: int = 1

    def device(self, index: int) -> torch.device:
        """Of worker `index`."""
        return torch.device("cuda", index % torch.cuda.device_count()) if self.on_gpu else torch.device("cpu")


class Studio:
    """One worker's; parts are loaded when a task first needs them."""

    def __init__(self, spec: StudioSpec, index: int) -> None:
        self.spec, self.device = spec, spec.device(index)
        if not spec.on_gpu:
            torch.set_num_threads(spec.threads)
        self._chains: dict[int, StageChain] = {}

    @cached_property
    def checkpoint(self) -> WanCheckpoint:
        """Opened, no weight read."""
        return open_checkpoint(self.spec.checkpoint, self.spec.revision)

    def chain(self, pp: int) -> StageChain:
        """The model in `pp` stages."""
        if pp not in self._chains:
            self._chains[pp] = StageChain(self.checkpoint, pp, self.spec.dtype, self.device, self.spec.clip)
        return self._chains[pp]

    def prepared(self, pp: int, prompt: str) -> Prepared:
        """Conditioning of a prompt on every stage."""
        return self.chain(pp).prepare(self._text(prompt))

    def decode(self, latents: Tensor) -> Frames:
        """[1, C, F, H, W] to frames as they are served."""
        frames: Frames = self._decoder.decode(latents, threading.Event())  # nobody cancels it
        return frames

    def save_native(self, video: Video, latents: Tensor, frames: Frames) -> None:
        """Keep the reference of a video."""
        folder = self.spec.run / NATIVE
        folder.mkdir(exist_ok=True)
        save_file({"latents": latents.contiguous()}, folder / f"{video.name}.safetensors")
        np.save(folder / f"{video.name}.npy", frames)

    def save_cached(self, video: Video, pp: int, schedule: Schedule, latents: Tensor) -> None:
        """Keep the cached latents of a video on `pp` stages."""
        folder = self._cached_folder(pp, schedule)
        folder.mkdir(exist_ok=True)
        save_file({"latents": latents.contiguous()}, folder / f"{video.name}.safetensors")

    def cached(self, video: Video, pp: int, schedule: Schedule) -> Tensor:
        """What `save_cached` kept."""
        return load_file(self._cached_folder(pp, schedule) / f"{video.name}.safetensors")["latents"]

    def _cached_folder(self, pp: int, schedule: Schedule) -> Path:
        return self.spec.run / f"{CACHED}-pp{pp}-{schedule.digest[:12]}"

    def native(self, video: Video) -> tuple[Frames, Tensor]:
        """Frames and latents that `save_native` kept."""
        folder = self.spec.run / NATIVE
        frames: Frames = np.load(folder / f"{video.name}.npy")
        return frames, load_file(folder / f"{video.name}.safetensors")["latents"]

    @cached_property
    def _decoder(self) -> VideoDecoder:
        return VideoDecoder(self.checkpoint.folder, torch.float32, self.device)

    def _text(self, prompt: str) -> dict[Branch, Tensor]:
        return {"positive": self._texts[f"positive.{prompt}"], "negative": self._texts["negative"]}

    @cached_property
    def _texts(self) -> dict[str, Tensor]:
        return load_file(self.spec.run / TEXTS)


def write_texts(spec: StudioSpec, prompts: list[str]) -> None:
    """Encode every prompt once, before the workers start: a real text encoder would not fit beside each of them."""
    checkpoint = open_checkpoint(spec.checkpoint, spec.revision)
    if not spec.on_gpu:
        torch.set_num_threads(spec.threads)
    encoder = TextEncoder(checkpoint.folder, DTYPES[spec.dtype], spec.device(0))
    texts: dict[str, Tensor] = {}
    for prompt in prompts:
        encoded = encoder.encode(prompt, spec.clip.negative_prompt, spec.clip.max_sequence_length)
        texts[f"positive.{prompt}"] = encoded["positive"].contiguous()
        texts["negative"] = encoded["negative"].contiguous()
    save_file(texts, spec.run / TEXTS)
