"""The Wan2.1 VAE of a world release, from its native .pth file to diffusers' AutoencoderKLWan."""

from __future__ import annotations

from pathlib import Path
from pickle import UnpicklingError

import torch
from diffusers import AutoencoderKLWan
from diffusers.loaders.single_file_utils import convert_wan_vae_to_diffusers
from torch import Tensor

from deployments.wan.checkpoint_files import CheckpointError


def read_pth(path: Path) -> dict[str, Tensor]:
    """The tensors of a .pth file by name; code in it is not run.  Raises CheckpointError."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (OSError, RuntimeError, UnpicklingError, EOFError) as error:
        raise CheckpointError(f"{path.name}: cannot be read as a file of tensors: {error}") from error
    if not isinstance(content, dict) or not all(isinstance(x, Tensor) for x in content.values()):
        raise CheckpointError(f"{path.name}: got {type(content).__name__}, expected tensors by name")
    return content


def load_vae(path: Path, dtype: torch.dtype, device: torch.device) -> AutoencoderKLWan:
    """Encoder and decoder, in eval mode and without gradients.  The width follows from the tensors' shapes."""
    state = convert_wan_vae_to_diffusers(read_pth(path))
    for name in ("encoder.conv_in.weight", "decoder.conv_in.weight", "post_quant_conv.weight"):
        if name not in state:
            raise CheckpointError(f"{path.name}: lacks {name!r} (diffusers' name): not a Wan2.1 VAE")
    with torch.device("meta"):
        vae = AutoencoderKLWan(
            base_dim=state["encoder.conv_in.weight"].shape[0], z_dim=state["post_quant_conv.weight"].shape[0]
        )
    try:
        vae.load_state_dict({name: x.to(device, dtype) for name, x in state.items()}, assign=True)
    except RuntimeError as error:
        raise CheckpointError(f"{path.name}: not a Wan2.1 VAE: {error}") from error
    return vae.requires_grad_(False).eval()


def latent_statistics(vae: AutoencoderKLWan) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of the VAE's own latents, [1, C, 1, 1, 1] fp32 on its device.

    The model works on (latent - mean) / std.
    """
    shape = (1, vae.config.z_dim, 1, 1, 1)
    mean = torch.tensor(vae.config.latents_mean).view(shape)
    std = torch.tensor(vae.config.latents_std).view(shape)
    return mean.to(vae.device), std.to(vae.device)
