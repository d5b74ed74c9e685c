"""Latents to frames to files: the VAE's decoder, and the replica that writes what it decoded.

Axes: B batch (1), C latent channel, F frame (pixel or latent), H/W height and width.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypedDict

import numpy as np
import ray
import torch
from diffusers import AutoencoderKLWan
from safetensors.torch import load
from torch import Tensor, nn

from deployments.storage import Storage
from deployments.video_file import frames_npz, sheet, video_mp4
from deployments.wan.free_memory import free_memory
from deployments.wan.memory_plan import MemoryPlan

logger = logging.getLogger("ray.serve")


class DecodingCancelled(Exception):
    """The caller went away while its latents were decoded."""


class VideoDecoder:
    """AutoencoderKLWan's decoder with the latents' normalisation undone, as at the end of `WanPipeline.__call__`."""

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
        vae = AutoencoderKLWan.from_pretrained(folder / "vae", dtype=dtype)
        del vae.encoder, vae.quant_conv
        if device.type == "cpu" and dtype == torch.float32 and torch.backends.mkldnn.is_available():
            use_onednn(vae)
        self._vae = vae.to(device).eval()
        self._dtype, self._device = dtype, device
        shape = (1, vae.config.z_dim, 1, 1, 1)
        self._mean = torch.tensor(vae.config.latents_mean).view(shape).to(device, dtype)
        self._inv_std = 1.0 / torch.tensor(vae.config.latents_std).view(shape).to(device, dtype)
        self._cancelled: threading.Event | None = None
        self._vae.decoder.register_forward_pre_hook(lambda *_: self._check())

    @torch.inference_mode()
    def decode(self, latents: Tensor, cancelled: threading.Event) -> np.ndarray:
        """latents: [1, C, F, H, W].  Returns RGB frames [4F - 3, 8H, 8W, 3] uint8.

        cancelled: looked at before each latent frame; once set, DecodingCancelled is raised.
        """
        self._cancelled = cancelled
        latents = latents.to(self._device, self._dtype)
        video = self._vae.decode(latents / self._inv_std + self._mean, return_dict=False)[0]
        # diffusers' VideoProcessor rounds on the CPU after a float copy of every pixel; here bytes cross instead.
        pixels = (video[0].float() * 0.5 + 0.5).clamp(0, 1).mul(255).round().to(torch.uint8)
        return pixels.permute(1, 2, 3, 0).cpu().numpy()

    def _check(self) -> None:
        if self._cancelled is not None and self._cancelled.is_set():
            raise DecodingCancelled


def use_onednn(module: nn.Module) -> None:
    """Run the module's 3-D convolutions on a CPU with oneDNN, whatever their size.

    torch picks oneDNN for a batch of one only where channels * frames * height pass 20,480 (`use_mkldnn` in its
    Convolution.cpp).  A VAE that decodes a small clip frame by frame stays below that, and the other way takes four
    times as long.  Frames differ by one level of 255 in a pixel or two of 100,000.
    """
    for conv in module.modules():
        if isinstance(conv, nn.Conv3d):
            conv._conv_forward = partial(_onednn_convolution, conv)  # type: ignore[method-assign]


def _onednn_convolution(conv: nn.Conv3d, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    out: Tensor = torch.ops.aten.mkldnn_convolution(
        x, weight, bias, conv.padding, conv.stride, conv.dilation, conv.groups
    )
    return out


class Decoded(TypedDict):
    """Reply of `DecoderReplica.decode`."""

    files: dict[str, int]
    """Name and bytes of each file written for the job."""
    decode_s: float
    encode_s: float


@dataclass
class _Decoding:
    """One job on the decoder's thread."""

    future: asyncio.Future[Decoded]
    cancelled: threading.Event
    callers: int = 0
    """Who waits for it: two, when a restarted driver asks again for what its forerunner had begun."""


class DecoderReplica:
    """The Serve replica of a `VideoDecoder`.  Frames never leave it: it writes the job's files itself."""

    def __init__(
        self, folder: Path, dtype: torch.dtype, on_gpu: bool, threads: int, memory: MemoryPlan, storage: Storage
    ) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="decoder")
        self._storage = storage
        self._decodings: dict[str, _Decoding] = {}
        device = torch.device("cuda" if on_gpu else "cpu")

        def load_vae() -> VideoDecoder:
            torch.set_num_threads(threads)
            if on_gpu:
                memory.refuse_if_too_big({"decoder": free_memory(device)})
            return VideoDecoder(folder, dtype, device)

        self._decoder = self._thread.submit(load_vae).result()

    async def decode(self, job: str, latents: list[ray.ObjectRef | bytes], fps: int, outputs: Sequence[str]) -> Decoded:
        """Decode one job and store its files.

        latents: one safetensors blob with ``latents``.  outputs: of ``sheet`` and ``frames``, beside ``video.mp4``.
        Cancelling the call stops the decoder at the next latent frame.  A second call for a job that is being decoded
        waits for the same outcome.
        """
        blob = latents[0] if isinstance(latents[0], bytes) else await latents[0]
        decoding = self._decodings.get(job)
        if decoding is None or decoding.cancelled.is_set():
            decoding = self._decodings[job] = self._begin(job, load(blob)["latents"], fps, tuple(outputs))
        decoding.callers += 1
        try:
            return await asyncio.shield(decoding.future)
        finally:
            decoding.callers -= 1
            if decoding.callers == 0:
                decoding.cancelled.set()
                if self._decodings.get(job) is decoding:
                    del self._decodings[job]

    def _begin(self, job: str, latents: Tensor, fps: int, outputs: tuple[str, ...]) -> _Decoding:
        cancelled = threading.Event()
        loop = asyncio.get_running_loop()
        future = loop.run_in_executor(self._thread, self._decode, job, latents, fps, outputs, cancelled)
        future.add_done_callback(lambda done: done.cancelled() or done.exception())  # its callers may have gone
        return _Decoding(future, cancelled)

    def _decode(
        self, job: str, latents: Tensor, fps: int, outputs: tuple[str, ...], cancelled: threading.Event
    ) -> Decoded:
        began = time.perf_counter()
        frames = self._decoder.decode(latents, cancelled)
        decoded = time.perf_counter()
        files = {"video.mp4": video_mp4(frames, fps)}
        if "sheet" in outputs:
            files["sheet.png"] = sheet(frames)
        if "frames" in outputs:
            files["frames.npz"] = frames_npz(frames, fps)
        if cancelled.is_set():
            raise DecodingCancelled
        for name, data in files.items():
            self._storage.put_bytes(data, f"{job}/{name}")
        logger.info("%s: decoded in %.3f s", job, decoded - began)
        sizes = {name: len(data) for name, data in files.items()}
        return Decoded(files=sizes, decode_s=decoded - began, encode_s=time.perf_counter() - decoded)
