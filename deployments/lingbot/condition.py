"""The image that a world starts from, as the condition channels of every chunk.

The condition is the VAE's encoding of the image followed by gray frames.  The encoder looks back so far that it is
exactly constant from latent 30 on, so 31 latents are encoded once and the last one stands for all later ones: the
condition does not depend on how long the world gets.

Axes: C latent channels, F latent frames, h/w latents, H/W pixels.
"""

from __future__ import annotations

import torch
from diffusers import AutoencoderKLWan
from torch import Tensor
from torch.nn import functional as F

from deployments.lingbot.stream_config import FRAMES_PER_LATENT
from deployments.lingbot.vae import latent_statistics

CONDITION_LATENTS = 31
MASK_CHANNELS = 4
RESIZE_RULE = "bicubic"
"""Part of every world key."""


@torch.inference_mode()
def encode_condition(vae: AutoencoderKLWan, image: Tensor, height: int, width: int) -> Tensor:
    """The condition [4 + C, 31, h, w] fp32 on the CPU.

    image: [H, W, 3] uint8 RGB of any size; it is resized to height x width pixels.
    """
    if image.ndim != 3 or image.shape[2] != 3 or image.dtype != torch.uint8:
        raise ValueError(f"image: got {list(image.shape)} {image.dtype}, expected [height, width, 3] uint8 RGB")
    pixels = image.permute(2, 0, 1)[None].float() / 127.5 - 1
    # On the CPU: the resized pixels, and so the world, do not depend on the device.
    first = F.interpolate(pixels, size=(height, width), mode="bicubic").clamp(-1, 1)
    video = first.new_zeros(1, 3, 1 + FRAMES_PER_LATENT * (CONDITION_LATENTS - 1), height, width)
    video[:, :, 0] = first
    latents = vae.encode(video.to(vae.device, vae.dtype)).latent_dist.mode().float()
    mean, std = latent_statistics(vae)
    latents = ((latents - mean) / std)[0]
    mask = latents.new_zeros(MASK_CHANNELS, *latents.shape[1:])
    mask[:, 0] = 1
    return torch.cat([mask, latents]).cpu()


def condition_slice(condition: Tensor, first_frame: int, frames: int) -> Tensor:
    """The condition of some latent frames, [1, 4 + C, frames, h, w]; frames beyond the last encoded one repeat it."""
    index = torch.arange(first_frame, first_frame + frames).clamp(max=condition.shape[1] - 1)
    return condition[:, index].unsqueeze(0)
