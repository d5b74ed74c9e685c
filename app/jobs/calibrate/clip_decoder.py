"""Latents to frames for the search: the served decoder, or the same arithmetic over the whole clip at once.

On a CPU the whole clip takes a sixth of the time of diffusers' frame loop and differs from it by rounding: one level of
255 in one pixel of 100,000.  Its activations grow with the clip, so it decodes small clips only.  Native and cached
videos of a comparison always come from the same decoder; timed requests use the served one.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Protocol

import torch
from diffusers import AutoencoderKLWan
from torch import Tensor

from app.jobs.train_shapes.whole_clip import WholeClip, to_channels_last
from app.jobs.video_pair import Frames
from deployments.wan.decoder import VideoDecoder

WHOLE_CLIP_BYTES = 256 << 20
"""Largest activation, fp32, of a clip that is decoded at once."""


class ClipDecoder(Protocol):
    """Decodes one video."""

    def decode(self, latents: Tensor) -> Frames:
        """latents: [1, C, F, H, W] fp32."""


class WholeClipDecoder:
    """`WholeClip` with the latents' normalisation undone, fp32."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        vae = AutoencoderKLWan.from_pretrained(folder / "vae", torch_dtype=torch.float32).to(device).eval()
        shape = (1, vae.config.z_dim, 1, 1, 1)
        self._mean = torch.tensor(vae.config.latents_mean).view(shape).to(device)
        self._inv_std = 1.0 / torch.tensor(vae.config.latents_std).view(shape).to(device)
        to_channels_last(vae)
        self._clip = WholeClip(vae)

    @torch.inference_mode()
    def decode(self, latents: Tensor) -> Frames:
        """See `ClipDecoder`."""
        latents = latents.to(self._mean.device) / self._inv_std + self._mean
        video = self._clip.decode(latents.contiguous(memory_format=torch.channels_last_3d))
        pixels = (video[0] * 0.5 + 0.5).clamp(0, 1).mul(255).round().to(torch.uint8)
        frames: Frames = pixels.permute(1, 2, 3, 0).cpu().numpy()
        return frames


class ServedDecoder:
    """The decoder of the service, which nobody cancels here."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        self._decoder = VideoDecoder(folder, torch.float32, device)

    def decode(self, latents: Tensor) -> Frames:
        """See `ClipDecoder`."""
        frames: Frames = self._decoder.decode(latents, threading.Event())
        return frames


def clip_decoder(
    folder: Path, device: torch.device, width: int, height: int, frames: int, base_dim: int
) -> ClipDecoder:
    """The faster one that fits.  base_dim: channels of the autoencoder at full resolution."""
    if device.type == "cpu" and 4 * width * height * frames * base_dim <= WHOLE_CLIP_BYTES:
        return WholeClipDecoder(folder, device)
    return ServedDecoder(folder, device)
