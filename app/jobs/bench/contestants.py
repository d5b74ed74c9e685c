"""The two sides of the comparison: diffusers' `WanPipeline`; our text encoder, gang of one and decoder, in one process.

Both time the same phases, and wait for the device only where one phase ends and the next begins.

    text      prompt to embeddings
    denoise   noise, timesteps and all solver steps
    decode    latents to frames in host memory
    overhead  the rest of the call
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from diffusers import AutoencoderKLWan, WanPipeline
from torch import Tensor

from app.jobs.bench.bench_request import BenchRequest
from app.jobs.bench.listener import WaitingListener
from app.jobs.bench.reuse import reused_steps, timing_step_cache
from deployments.gang.rank import Rank
from deployments.gang.transport import Transport
from deployments.wan.checkpoint import open_checkpoint
from deployments.wan.decoder import VideoDecoder
from deployments.wan.memory_plan import DTYPES
from deployments.wan.stage_loading import load_stages
from deployments.wan.text_encoder import TextEncoder
from deployments.wan.video_worker import VideoWorker

PHASES = ("text", "denoise", "decode", "overhead")
STOP_S = 60.0


@dataclass(frozen=True)
class Timed:
    """One run."""

    phases: dict[str, float]
    """Seconds, keys `PHASES`."""
    latents: Tensor
    """[1, C, F, H, W] fp32 on the CPU."""

    @property
    def total(self) -> float:
        """Seconds of the whole call."""
        return sum(self.phases.values())


class Contestant(Protocol):
    """A loaded model that makes videos."""

    @property
    def name(self) -> str:
        """For the table."""

    def run(self, request: BenchRequest) -> Timed:
        """Make the video, drop its frames."""

    def close(self) -> None:
        """Give everything back."""


class DiffusersPipeline:
    """`WanPipeline` as its model card uses it: transformer in `dtype`, VAE in `vae_dtype`."""

    name = "diffusers WanPipeline"

    def __init__(self, folder: Path, dtype: str, vae_dtype: str, device: torch.device) -> None:
        vae = AutoencoderKLWan.from_pretrained(folder / "vae", dtype=DTYPES[vae_dtype])
        self._pipeline = WanPipeline.from_pretrained(folder, vae=vae, dtype=DTYPES[dtype]).to(device)
        self._pipeline.set_progress_bar_config(disable=True)
        self._device = device
        self._encoded = self._decoding = 0.0
        encode, decode = self._pipeline.encode_prompt, self._pipeline.vae.decode

        def encode_prompt(*args: Any, **kwargs: Any) -> Any:
            out = encode(*args, **kwargs)
            self._encoded = self._now()
            return out

        def decode_latents(*args: Any, **kwargs: Any) -> Any:
            self._decoding = self._now()
            return decode(*args, **kwargs)

        self._pipeline.encode_prompt, self._pipeline.vae.decode = encode_prompt, decode_latents

    def run(self, request: BenchRequest) -> Timed:
        """As `Contestant.run`; all but the phases is the pipeline's own."""
        latents: list[Tensor] = []

        def keep(_pipeline: WanPipeline, step: int, _timestep: Tensor, values: dict[str, Tensor]) -> dict[str, Tensor]:
            if step == request.steps - 1:
                latents.append(values["latents"])
            return values

        began = self._now()
        self._pipeline(
            prompt=request.prompt,
            negative_prompt="",
            height=request.shape.height,
            width=request.shape.width,
            num_frames=request.shape.frames,
            num_inference_steps=request.steps,
            guidance_scale=request.guidance_scale,
            max_sequence_length=request.max_sequence_length,
            generator=torch.Generator("cpu").manual_seed(request.seed),
            callback_on_step_end=keep,
            output_type="np",
        )
        ended = self._now()
        phases = {
            "text": self._encoded - began,
            "denoise": self._decoding - self._encoded,
            "decode": ended - self._decoding,
            "overhead": 0.0,  # no seam to see it: what lies between its phases is counted in them
        }
        return Timed(phases, latents[0].cpu())

    def close(self) -> None:
        """Free the weights."""
        del self._pipeline

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


@dataclass(frozen=True)
class _SoloSpec:
    """A `RankSpec` of one rank in this process."""

    folder: str
    dtype: str
    compile_blocks: bool
    on: torch.device

    backend: Literal["gloo"] = "gloo"
    data_timeout_s: float = 60.0
    in_flight: int = 1
    threads: int | None = None

    def device(self, rank: int) -> torch.device:
        return self.on

    def worker(self, rank: int, device: torch.device, transport: Transport) -> VideoWorker:
        checkpoint = open_checkpoint(self.folder)
        blocks = range(checkpoint.num_blocks)
        stages = load_stages(checkpoint, blocks, DTYPES[self.dtype], device, compile_blocks=self.compile_blocks)
        return VideoWorker(stages, rank, device, transport, step_cache=timing_step_cache(device))


class Worldstage:
    """Our side without Ray: PP1/CFG1."""

    def __init__(
        self, folder: Path, dtype: str, vae_dtype: str, device: torch.device, compile_mode: Literal["none", "blocks"]
    ) -> None:
        self.name = f"worldstage, compile: {compile_mode}"
        self._checkpoint = open_checkpoint(str(folder))
        self._text = TextEncoder(folder, DTYPES[dtype], device)
        self._decoder = VideoDecoder(folder, DTYPES[vae_dtype], device)
        self._rank = Rank(_SoloSpec(str(folder), dtype, compile_mode == "blocks", device), 0, 1, None)
        self._rank.wait_ready()
        self._runs = 0

    def run(self, request: BenchRequest) -> Timed:
        """As `Contestant.run`."""
        self._runs += 1
        began = time.perf_counter()
        negative = "" if request.guidance_scale > 1 else None
        text = self._text.encode(request.prompt, negative, request.max_sequence_length)
        encoded = time.perf_counter()
        plan = request.plan(self._checkpoint, 1, 1)
        listener = WaitingListener()
        submission = request.submission(f"run-{self._runs}", self._checkpoint, plan, text, listener)
        submitted = time.perf_counter()
        self._rank.conductor.submit(submission)
        latents = listener.wait()
        denoised = time.perf_counter()
        self._decoder.decode(latents, threading.Event())
        ended = time.perf_counter()
        phases = {
            "text": encoded - began,
            "denoise": denoised - submitted,
            "decode": ended - denoised,
            "overhead": submitted - encoded,
        }
        return Timed(phases, latents)

    def close(self) -> None:
        """End the device thread and free the weights."""
        self._rank.stop(STOP_S)
        del self._rank, self._text, self._decoder


class Reusing:
    """`Worldstage` with steps that the step cache predicts.  It shares the model and does not close it."""

    def __init__(self, native: Worldstage, count: int) -> None:
        self._native, self._count = native, count
        self.name = f"{native.name}, {count} reused"

    def run(self, request: BenchRequest) -> Timed:
        """As `Contestant.run`; a warm-up too short for so many reuses one step."""
        fitting = self._count if request.steps > 2 * self._count else 1
        return self._native.run(replace(request, reuse=reused_steps(request.steps, fitting)))

    def close(self) -> None:
        """Nothing of its own."""
