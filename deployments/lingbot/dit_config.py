"""Sizes of a causal world transformer, read from the shapes of its tensors; config.json fills what shapes cannot say.

Released config.json files differ in what they hold, and some values in them are another runtime's defaults, so a
shape always decides; a config value that contradicts one is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from deployments.lingbot.stream_config import PATCH, VAE_STRIDE
from deployments.wan.checkpoint_files import CheckpointError, TensorInfo

RELEASED_HEAD_DIM = 128
"""Of every released model; where config.json gives no number of heads, it follows from this."""


@dataclass(frozen=True)
class DiTConfig:
    """Sizes of one transformer."""

    in_dim: int
    """Channels of noisy latents, mask and image condition together: 36 in every release."""
    out_dim: int
    """Latent channels."""
    dim: int
    ffn_dim: int
    num_heads: int
    num_layers: int
    freq_dim: int
    """Length of the sinusoidal time signal, even."""
    text_dim: int
    text_len: int
    """Prompts are padded with zero rows to this length; the padding takes part in attention."""
    control_dim: int
    """Camera channels of a pixel: 6, a ray's origin and direction."""
    eps: float = 1e-6

    @property
    def head_dim(self) -> int:
        """Channels of one head."""
        return self.dim // self.num_heads

    @property
    def condition_dim(self) -> int:
        """Channels of mask and image condition."""
        return self.in_dim - self.out_dim

    @property
    def control_channels(self) -> int:
        """Channels of a control tensor at latent resolution."""
        return self.control_dim * VAE_STRIDE**2


def read_dit_config(file: str, config: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> DiTConfig:
    """The sizes of the model whose headers are `tensors`.

    file: name of config.json for complaints.  Raises CheckpointError where a tensor is missing that decides a size, or
    where the config contradicts a shape.
    """

    def shape(name: str, axes: int) -> tuple[int, ...]:
        if name not in tensors:
            raise CheckpointError(f"{file}: the weight files beside it lack {name!r}: not a causal world transformer")
        if len(tensors[name].shape) != axes:
            raise CheckpointError(
                f"{tensors[name].file}: {name!r} has shape {list(tensors[name].shape)}, expected {axes} axes"
            )
        return tensors[name].shape

    dim, in_dim, *patch = shape("patch_embedding.weight", 5)
    if tuple(patch) != PATCH:
        raise CheckpointError(
            f"{tensors['patch_embedding.weight'].file}: patch_embedding.weight: got patches of {patch}, "
            f"expected {list(PATCH)}"
        )
    pixels = VAE_STRIDE**2 * PATCH[1] * PATCH[2]
    numbers = {name.split(".")[1] for name in tensors if name.startswith("blocks.")}
    heads = config.get("num_heads", config.get("num_attention_heads"))
    if heads is None and dim % RELEASED_HEAD_DIM == 0:
        heads = dim // RELEASED_HEAD_DIM
    if not isinstance(heads, int) or heads < 1 or dim % (2 * heads):
        raise CheckpointError(
            f"{file}: num_heads: got {heads!r}, expected a number that cuts {dim} channels into even parts; "
            f"it may be left out only where heads have {RELEASED_HEAD_DIM} channels"
        )
    found = DiTConfig(
        in_dim=in_dim,
        out_dim=shape("head.head.weight", 2)[0] // (PATCH[1] * PATCH[2]),
        dim=dim,
        ffn_dim=shape("blocks.0.ffn.0.weight", 2)[0],
        num_heads=heads,
        num_layers=len(numbers),
        freq_dim=shape("time_embedding.0.weight", 2)[1],
        text_dim=shape("text_embedding.0.weight", 2)[1],
        text_len=int(config.get("text_len", 512)),
        control_dim=shape("patch_embedding_wancamctrl.weight", 2)[1] // pixels,
        eps=float(config.get("eps", 1e-6)),
    )
    for field in ("in_dim", "out_dim", "dim", "ffn_dim", "num_layers", "freq_dim", "text_dim"):
        if field in config and config[field] != getattr(found, field):
            raise CheckpointError(
                f"{file}: {field}: got {config[field]!r}, but the tensors have {getattr(found, field)}"
            )
    return found


def tensor_shapes(config: DiTConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of the model: 21, and 35 a block."""
    shapes = {"patch_embedding.weight": (config.dim, config.in_dim, *PATCH), "patch_embedding.bias": (config.dim,)}
    pixels = VAE_STRIDE**2 * PATCH[1] * PATCH[2]

    def linear(name: str, rows: int, columns: int) -> None:
        shapes[f"{name}.weight"], shapes[f"{name}.bias"] = (rows, columns), (rows,)

    d = config.dim
    linear("patch_embedding_wancamctrl", d, config.control_dim * pixels)
    linear("c2ws_hidden_states_layer1", d, d)
    linear("c2ws_hidden_states_layer2", d, d)
    linear("text_embedding.0", d, config.text_dim)
    linear("text_embedding.2", d, d)
    linear("time_embedding.0", d, config.freq_dim)
    linear("time_embedding.2", d, d)
    linear("time_projection.1", 6 * d, d)
    linear("head.head", config.out_dim * PATCH[1] * PATCH[2], d)
    shapes["head.modulation"] = (1, 2, d)
    for number in range(config.num_layers):
        block = f"blocks.{number}"
        for attention in ("self_attn", "cross_attn"):
            for part in "qkvo":
                linear(f"{block}.{attention}.{part}", d, d)
            for norm in ("norm_q", "norm_k"):
                shapes[f"{block}.{attention}.{norm}.weight"] = (d,)
        shapes[f"{block}.norm3.weight"] = shapes[f"{block}.norm3.bias"] = (d,)
        linear(f"{block}.ffn.0", config.ffn_dim, d)
        linear(f"{block}.ffn.2", d, config.ffn_dim)
        shapes[f"{block}.modulation"] = (1, 6, d)
        for layer in ("cam_injector_layer1", "cam_injector_layer2", "cam_scale_layer", "cam_shift_layer"):
            linear(f"{block}.{layer}", d, d)
    return shapes
