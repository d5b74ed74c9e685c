"""Peak memory of one forward pass of each part of a model: formulas whose terms are the tensors that live at the peak.

T tokens, D model width, W feed-forward width, s bytes an element; all results in bytes, weights and inputs left out.
None was measured on CUDA, where attention keeps less and convolutions have workspaces; callers add slack for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch

Device = Literal["cpu", "cuda"]


def stage_activations(tokens: int, width: int, ffn_width: int, dtype: torch.dtype) -> int:
    """A stage, however many blocks it has: s T D + max(s (4 D + 2 W), (4 s + 14) D) T.

    First term: the embedded latents or the received hidden state.  Feed-forward: the hidden states of two blocks, the
    normed input, the attention's output, and W before and after the activation function.  Attention: q, k, v and the
    normed input, and the fp32 products of the rotation.  On CPU, fp32 and bf16, W = D to 6 D: measured within 1 %.
    """
    size = dtype.itemsize
    feed_forward = size * (4 * width + 2 * ffn_width)
    attention = (4 * size + 14) * width
    return tokens * (size * width + max(feed_forward, attention))


def decoder_activations(
    pixels: int, frames: int, base_width: int, residual_blocks: int, dtype: torch.dtype, device: Device
) -> int:
    """Decoding one video: s C P (8 R + 45) and two copies of it.  C base_width, R residual_blocks, P pixels of a frame.

    The terms grow with what a step of four frames keeps at full size: the convolutions' caches of two frames each (R),
    and the upsampled input of the last level.  On a CPU convolutions may unfold their input: 27 * 4 = 108 more.
    On CPU measured 0.85 to 1 of it, and down to 0.35 where oneDNN takes the convolution and unfolds nothing.
    """
    per_channel = 45 + 8 * residual_blocks + (108 if device == "cpu" else 0)
    return dtype.itemsize * pixels * (base_width * per_channel + 2 * 3 * frames)


def text_encoder_activations(tokens: int, config: Mapping[str, int], dtype: torch.dtype) -> int:
    """Encoding one prompt: (2 s + 8) H L^2 for scores, bias and fp32 softmax; s L (4 W + 6 D + 6 D_heads) for the rest.

    H heads, L tokens.  config: `UMT5Config`'s.  On CPU measured 0.35 to 1 of it; small beside the weights.
    """
    heads, inner = config["num_heads"], config["num_heads"] * config["d_kv"]
    scores = (2 * dtype.itemsize + 8) * heads * tokens**2
    return scores + dtype.itemsize * tokens * (4 * config["d_ff"] + 6 * config["d_model"] + 6 * inner)
