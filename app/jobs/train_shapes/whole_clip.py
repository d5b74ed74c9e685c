"""A Wan autoencoder over a whole clip in one pass, equal to the chunk loop of `AutoencoderKLWan.encode` and `.decode`.

diffusers walks a clip in chunks of four frames and carries the last frames of every convolution along. For training
on short clips that is slow, and training on shorter clips than are served lets colours drift. Over the whole clip the
same arithmetic is:

- a causal convolution pads two zero frames in front;
- a halving in time keeps frame 0 and takes a strided convolution over frames 0..T-1 for the rest;
- a doubling in time keeps latent frame 0 and takes a causal convolution over the later ones, whose two channel halves
  interleave.

Axes: N clips, C channels, T frames (4k+1), F = k+1 latent frames. Read from diffusers 0.42.1
models/autoencoders/autoencoder_kl_wan.py.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKLWan
from diffusers.models.autoencoders.autoencoder_kl_wan import WanMidBlock, WanResample, WanResidualBlock
from torch import Tensor, nn


def norm_silu_pad(x: Tensor, gamma: Tensor) -> Tensor:
    """RMS norm over channels, SiLU, two zero frames in front: what stands before every 3x3x3 convolution. Compiles
    into one kernel."""
    scale = x.shape[1] ** 0.5
    normed = F.normalize(x.float(), dim=1).to(x.dtype) * scale * gamma.to(x.dtype)
    return F.pad(F.silu(normed), (0, 0, 0, 0, 2, 0))


def to_channels_last(vae: AutoencoderKLWan) -> None:
    """Convolution weights with channels innermost, the layout that tensor cores read without a copy."""
    for parameter in vae.parameters():
        if parameter.ndim in (4, 5) and parameter.shape[1] > 1:
            parameter.data = parameter.data.contiguous(
                memory_format=torch.channels_last if parameter.ndim == 4 else torch.channels_last_3d
            )


class WholeClip:
    """Encodes and decodes with the weights of `vae`; `norm` may be a compiled `norm_silu_pad`."""

    def __init__(self, vae: AutoencoderKLWan, norm: Callable[[Tensor, Tensor], Tensor] = norm_silu_pad):
        self.vae = vae
        self.norm = norm

    def encode(self, clip: Tensor) -> tuple[Tensor, Tensor]:
        """[N, 3, T, H, W] in [-1, 1] -> mean and log variance, each [N, 16, F, H/8, W/8] fp32, latent units not yet
        normalised."""
        encoder = self.vae.encoder
        x = self._convolve(F.pad(clip, (0, 0, 0, 0, 2, 0)), encoder.conv_in)
        for layer in encoder.down_blocks:
            x = self._down(x, layer) if hasattr(layer, "resample") else self._residual(x, layer)
        x = self._middle(x, encoder.mid_block)
        x = self._convolve(self.norm(x, encoder.norm_out.gamma), encoder.conv_out)
        mean, log_variance = self.vae.quant_conv(x).float().chunk(2, dim=1)
        return mean, log_variance.clamp(-30, 20)

    def decode(self, latents: Tensor) -> Tensor:
        """[N, 16, F, h, w] latent units -> [N, 3, 4F-3, 8h, 8w] fp32, not clamped to [-1, 1]."""
        decoder = self.vae.decoder
        x = self._convolve(F.pad(self.vae.post_quant_conv(latents), (0, 0, 0, 0, 2, 0)), decoder.conv_in)
        x = self._middle(x, decoder.mid_block)
        for block in decoder.up_blocks:
            for layer in block.resnets:
                x = self._residual(x, layer)
            if block.upsamplers is not None:
                x = self._up(x, block.upsamplers[0])
        return self._convolve(self.norm(x, decoder.norm_out.gamma), decoder.conv_out).float()

    @staticmethod
    def _convolve(padded: Tensor, conv: nn.Conv3d) -> Tensor:
        return F.conv3d(padded, conv.weight, conv.bias, padding=(0, 1, 1))  # time is padded already

    def _residual(self, x: Tensor, block: WanResidualBlock) -> Tensor:
        h = self._convolve(self.norm(x, block.norm1.gamma), block.conv1)
        h = self._convolve(self.norm(h, block.norm2.gamma), block.conv2)
        return h + block.conv_shortcut(x)

    def _middle(self, x: Tensor, block: WanMidBlock) -> Tensor:
        x = self._residual(x, block.resnets[0])
        for attention, residual in zip(block.attentions, block.resnets[1:], strict=True):
            x = self._residual(attention(x), residual)
        return x

    @staticmethod
    def _each_frame(x: Tensor, layer: nn.Module) -> Tensor:
        n, c, t, h, w = x.shape
        x = layer(x.permute(0, 2, 1, 3, 4).reshape(n * t, c, h, w))
        return x.view(n, t, *x.shape[1:]).permute(0, 2, 1, 3, 4)

    def _down(self, x: Tensor, layer: WanResample) -> Tensor:
        x = self._each_frame(x, layer.resample)
        if layer.mode == "downsample3d" and x.shape[2] > 1:
            x = torch.cat([x[:, :, :1], layer.time_conv(x)], dim=2)
        return x

    def _up(self, x: Tensor, layer: WanResample) -> Tensor:
        if layer.mode == "upsample3d" and x.shape[2] > 1:
            n, c, t, h, w = x.shape
            pairs = layer.time_conv(x[:, :, 1:]).view(n, 2, c, t - 1, h, w)
            later = torch.stack((pairs[:, 0], pairs[:, 1]), dim=3).reshape(n, c, 2 * (t - 1), h, w)
            x = torch.cat([x[:, :, :1], later], dim=2)
        return self._each_frame(x, layer.resample)
