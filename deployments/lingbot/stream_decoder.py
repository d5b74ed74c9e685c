"""Latents to frames, chunk by chunk: the VAE's decoder with the look-back of every layer kept between calls.

Decoding in chunks equals decoding the whole bit for bit.  The decoder looks back 38 latents, so its state after any
frame is rebuilt exactly from the latents alone, 40 of them (`warm`).

Axes: C latent channel, F latent frames, h/w latents, T frames, H/W pixels.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from diffusers import AutoencoderKLWan
from diffusers.models.autoencoders.autoencoder_kl_wan import WanCausalConv3d
from safetensors.torch import load, save
from torch import Tensor

from deployments.lingbot.stream_config import WARM_LATENTS
from deployments.lingbot.vae import latent_statistics

_FIRST_ONLY = "Rep"
"""diffusers' mark in the slot of a time-doubling layer that has seen one latent and nothing before it."""


@dataclass
class DecoderState:
    """Between two chunks of one session.  Tensors are replaced, never written, so `fork` shares them."""

    features: list[Tensor | str | None]
    """A slot for each causal convolution: its last two inputs along time."""
    latents: int = 0
    """Latent frames decoded so far."""

    def fork(self) -> DecoderState:
        """An independent state at the same place."""
        return DecoderState(list(self.features), self.latents)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        return sum(x.nbytes for x in self.features if isinstance(x, Tensor))

    def to_bytes(self) -> bytes:
        """A safetensors file; `StreamDecoder.load` is the inverse."""
        tensors = {str(slot): x.contiguous() for slot, x in enumerate(self.features) if isinstance(x, Tensor)}
        first = ",".join(str(slot) for slot, x in enumerate(self.features) if x == _FIRST_ONLY)
        return save(tensors, {"latents": str(self.latents), "first_only": first, "slots": str(len(self.features))})


class StreamDecoder:
    """The decoder of any number of sessions; each brings its own state."""

    def __init__(self, vae: AutoencoderKLWan) -> None:
        self._vae = vae
        self._slots = sum(isinstance(m, WanCausalConv3d) for m in vae.decoder.modules())
        self._mean, self._std = latent_statistics(vae)

    def start(self) -> DecoderState:
        """The state before a world's first latent."""
        return DecoderState([None] * self._slots)

    @torch.inference_mode()
    def decode(self, latents: Tensor, state: DecoderState) -> np.ndarray:
        """The frames of the next latents, RGB [T, H, W, 3] uint8: 1 for a world's first latent, 4 for each later one.

        latents: [1, C, F, h, w], as the model makes them.  Advances `state`; a call that raises leaves it as it was.
        """
        ahead = state.fork()
        parts = [self._pixels(part) for part in self._frames(latents, ahead)]
        state.features, state.latents = ahead.features, ahead.latents
        return np.concatenate(parts)

    @torch.inference_mode()
    def warm(self, latents: Tensor, position: int) -> DecoderState:
        """The state after `position` latents, from the last of them.

        latents: [1, C, F, h, w], the `WARM_LATENTS` before `position`, or all of them if there are fewer.
        """
        if latents.shape[2] != min(position, WARM_LATENTS):
            raise ValueError(
                f"latents: got {latents.shape[2]} before latent {position}, expected {min(position, WARM_LATENTS)}"
            )
        state = self.start()
        for _ in self._frames(latents, state):
            pass
        state.latents = position
        return state

    def load(self, data: bytes) -> DecoderState:
        """Inverse of `DecoderState.to_bytes`.  Raises ValueError for the state of another decoder."""
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]
        if int(header["slots"]) != self._slots:
            raise ValueError(f"decoder state: got {header['slots']} slots, this decoder has {self._slots}")
        state = DecoderState([None] * self._slots, int(header["latents"]))
        for slot, tensor in load(data).items():
            state.features[int(slot)] = tensor.to(self._vae.device)
        for slot in filter(None, header["first_only"].split(",")):
            state.features[int(slot)] = _FIRST_ONLY
        return state

    def _frames(self, latents: Tensor, state: DecoderState) -> Iterator[Tensor]:
        """[1, 3, T, H, W] about in [-1, 1], a latent at a time."""
        z = (latents.to(self._vae.device).float() * self._std + self._mean).to(self._vae.dtype)
        z = self._vae.post_quant_conv(z)
        for frame in range(z.shape[2]):
            first = state.latents == 0
            part = z[:, :, frame : frame + 1]
            yield self._vae.decoder(part, feat_cache=state.features, feat_idx=[0], first_chunk=first)
            state.latents += 1

    @staticmethod
    def _pixels(video: Tensor) -> np.ndarray:
        """[1, 3, T, H, W] in [-1, 1] to [T, H, W, 3]."""
        pixels = (video[0].float() * 0.5 + 0.5).clamp(0, 1).mul(255).round().to(torch.uint8)
        return pixels.permute(1, 2, 3, 0).cpu().numpy()
