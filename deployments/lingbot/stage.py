"""One pipeline stage of a causal world transformer: a block range, with latent embedding (first) and head (last).

Parameters carry the names of the released files.  Every stage also holds the small embeddings (time, text, camera), so
only the hidden state crosses between stages.  The residual stream is fp32 whatever the weights are, as it is upstream
from the first gate on; norms, modulation, time and head are fp32, attention and all other products in the weights'
dtype.

Written from the layout and formulas of LingBot-World-Fast (Apache-2.0, Robbyant/lingbot-world).

Axes: 1 batch, L tokens of a chunk, D width, H heads, E head channels, C latent channels, c latent frames, h/w latents.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from deployments.lingbot.dit_config import DiTConfig
from deployments.lingbot.kv_ring import KVRing
from deployments.lingbot.rope import rotate
from deployments.lingbot.stream_config import PATCH

TextKV = tuple[tuple[Tensor, Tensor], ...]
"""Cross-attention key and value of each local block, [1, text_len, H, E]."""


def kept_in_fp32(name: str) -> bool:
    """Whether a tensor stays fp32 in a stage of any dtype."""
    parts = name.split(".")
    return (
        parts[0] in ("time_embedding", "time_projection", "head")
        or parts[-1] == "modulation"
        or parts[-2].startswith("norm")
    )


@dataclass(frozen=True)
class StepTime:
    """A timestep's embeddings, fp32."""

    embedding: Tensor
    """[1, 1, D], for the head."""
    modulation: Tensor
    """[1, 1, 6, D], for the blocks."""


@dataclass(frozen=True)
class ChunkInputs:
    """What the passes of one chunk share on a stage."""

    views: tuple[tuple[Tensor, Tensor], ...]
    """What the camera does to each local block's stream: factor and offset, [1, L, D] in the stage's dtype.

    Computed once a chunk: they are a quarter of a block's products and the same in all five passes.
    """
    rotary: Tensor
    """[L, 1, E / 2] complex128, of this chunk's absolute frames."""
    grid: tuple[int, int, int]
    """Tokens along frames, rows and columns; L is their product."""


class Attention(nn.Module):
    """Projections of one attention; queries and keys are normalised over the full width."""

    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        d = config.dim
        self.heads = config.num_heads
        self.q, self.k, self.v, self.o = (nn.Linear(d, d) for _ in range(4))
        self.norm_q, self.norm_k = (nn.RMSNorm(d, eps=config.eps) for _ in range(2))

    def query(self, x: Tensor) -> Tensor:
        """[1, N, D] to [1, N, H, E] fp32."""
        return self.norm_q(self.q(x).float()).unflatten(2, (self.heads, -1))

    def key(self, x: Tensor) -> Tensor:
        """As `query`."""
        return self.norm_k(self.k(x).float()).unflatten(2, (self.heads, -1))

    def value(self, x: Tensor) -> Tensor:
        """[1, N, H, E], the dtype of x."""
        return self.v(x).unflatten(2, (self.heads, -1))

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Full attention, no mask.  query, key, value: [1, N, H, E]; returns [1, N, D]."""
        out = F.scaled_dot_product_attention(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2))
        return self.o(out.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """One transformer block; the camera enters between self-attention and cross-attention."""

    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        d = config.dim
        self.eps = config.eps
        self.self_attn, self.cross_attn = Attention(config), Attention(config)
        self.norm3 = nn.LayerNorm(d, eps=config.eps)
        self.ffn = nn.Sequential(nn.Linear(d, config.ffn_dim), nn.GELU("tanh"), nn.Linear(config.ffn_dim, d))
        self.modulation = nn.Parameter(torch.empty(1, 6, d))
        self.cam_injector_layer1, self.cam_injector_layer2 = nn.Linear(d, d), nn.Linear(d, d)
        self.cam_scale_layer, self.cam_shift_layer = nn.Linear(d, d), nn.Linear(d, d)

    def forward(
        self,
        x: Tensor,
        modulation: Tensor,
        rotary: Tensor,
        view: tuple[Tensor, Tensor],
        text: tuple[Tensor, Tensor],
        kv: LayerKV,
    ) -> Tensor:
        """x: [1, L, D] fp32.  modulation: [1, 1, 6, D] fp32.  Returns [1, L, D] fp32."""
        shift, scale, gate, ffn_shift, ffn_scale, ffn_gate = (self.modulation.unsqueeze(1) + modulation).unbind(2)
        query, window_key, window_value = self._write_kv(x, shift, scale, rotary, kv)
        x = x + gate * self.self_attn.attend(query, window_key, window_value)
        x = view[0] * x + view[1]
        x = x + self._read(self.norm3(x).to(query.dtype), text)
        normed = (self._normed(x) * (1 + ffn_scale) + ffn_shift).to(query.dtype)
        return x + ffn_gate * self.ffn(normed)

    def view(self, camera: Tensor) -> tuple[Tensor, Tensor]:
        """Factor and offset [1, L, D] of the camera embedding [1, L, D]."""
        h = self.cam_injector_layer2(F.silu(self.cam_injector_layer1(camera))) + camera
        return 1 + self.cam_scale_layer(h), self.cam_shift_layer(h)

    def write_kv(self, x: Tensor, modulation: Tensor, rotary: Tensor, kv: LayerKV) -> None:
        """Only this block's keys and values: all that the last block of a clean pass is for."""
        shift, scale = (self.modulation.unsqueeze(1) + modulation).unbind(2)[:2]
        self._write_kv(x, shift, scale, rotary, kv)

    def _write_kv(
        self, x: Tensor, shift: Tensor, scale: Tensor, rotary: Tensor, kv: LayerKV
    ) -> tuple[Tensor, Tensor, Tensor]:
        h = (self._normed(x) * (1 + scale) + shift).to(self.self_attn.q.weight.dtype)
        query = rotate(self.self_attn.query(h), rotary).to(h.dtype)
        key = rotate(self.self_attn.key(h), rotary).to(h.dtype)
        return query, *kv.ring.write(kv.layer, key, self.self_attn.value(h))

    def _read(self, h: Tensor, text: tuple[Tensor, Tensor]) -> Tensor:
        return self.cross_attn.attend(self.cross_attn.query(h).to(h.dtype), *text)

    def _normed(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], eps=self.eps)


@dataclass(frozen=True)
class LayerKV:
    """A block's place in its session's ring."""

    ring: KVRing
    layer: int


class Head(nn.Module):
    """From the hidden state to the flow; fp32."""

    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        self.eps = config.eps
        self.head = nn.Linear(config.dim, config.out_dim * PATCH[1] * PATCH[2])
        self.modulation = nn.Parameter(torch.empty(1, 2, config.dim))

    def forward(self, x: Tensor, embedding: Tensor, grid: tuple[int, int, int]) -> Tensor:
        """x: [1, L, D] fp32.  Returns the flow [1, C, c, h, w] fp32."""
        shift, scale = (self.modulation + embedding).chunk(2, dim=1)
        out = self.head(F.layer_norm(x, x.shape[-1:], eps=self.eps) * (1 + scale) + shift)
        out = out.view(1, *grid, *PATCH, -1)  # channels are innermost
        return out.permute(0, 7, 1, 4, 2, 5, 3, 6).flatten(6, 7).flatten(4, 5).flatten(2, 3)


class WorldStage(nn.Module):
    """A block range.  `checkpoint.load_stage` fills it.

    num_blocks: of this stage.  dtype: of the weights that are not fp32, of keys and values, and of the products.
    """

    def __init__(self, config: DiTConfig, num_blocks: int, dtype: torch.dtype, *, first: bool, last: bool) -> None:
        super().__init__()
        d = config.dim
        self.config, self.dtype, self.first, self.last = config, dtype, first, last
        if first:
            self.patch_embedding = nn.Conv3d(config.in_dim, d, PATCH, stride=PATCH)
        self.patch_embedding_wancamctrl = nn.Linear(config.control_channels * PATCH[1] * PATCH[2], d)
        self.c2ws_hidden_states_layer1, self.c2ws_hidden_states_layer2 = nn.Linear(d, d), nn.Linear(d, d)
        self.text_embedding = nn.Sequential(nn.Linear(config.text_dim, d), nn.GELU("tanh"), nn.Linear(d, d))
        self.time_embedding = nn.Sequential(nn.Linear(config.freq_dim, d), nn.SiLU(), nn.Linear(d, d))
        self.time_projection = nn.Sequential(nn.SiLU(), nn.Linear(d, 6 * d))
        self.blocks = nn.ModuleList(Block(config) for _ in range(num_blocks))
        if last:
            self.head = Head(config)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.patch_embedding_wancamctrl.weight.device

    @property
    def local_blocks(self) -> tuple[Block, ...]:
        """This stage's blocks in order."""
        return tuple(cast(Block, block) for block in self.blocks)

    def text_kv(self, text: Tensor) -> TextKV:
        """text: a prompt's embeddings [n <= text_len, text_dim], without padding."""
        if text.ndim != 2 or text.shape[0] > self.config.text_len or text.shape[1] != self.config.text_dim:
            raise ValueError(
                f"text: got {list(text.shape)}, expected at most [{self.config.text_len}, {self.config.text_dim}]"
            )
        padded = text.new_zeros(1, self.config.text_len, self.config.text_dim)
        padded[0, : text.shape[0]] = text
        context = self.text_embedding(padded.to(self.device, self.dtype))
        return tuple(
            (block.cross_attn.key(context).to(self.dtype), block.cross_attn.value(context))
            for block in self.local_blocks
        )

    def time(self, timestep: int) -> StepTime:
        """timestep: 0 (clean) to 999."""
        half = self.config.freq_dim // 2
        # fp64, as upstream: the signal feeds every block.
        frequencies = torch.pow(10000.0, -torch.arange(half, dtype=torch.float64) / half)
        angles = timestep * frequencies
        signal = torch.cat([angles.cos(), angles.sin()]).float().to(self.device).view(1, 1, -1)
        embedding = self.time_embedding(signal)
        return StepTime(embedding, self.time_projection(embedding).unflatten(2, (6, -1)))

    def chunk_inputs(self, control: Tensor, rotary: Tensor) -> ChunkInputs:
        """control: [1, 384, c, h, w].  rotary: as `rope.rotary_table` gives it for the chunk's frames."""
        _, channels, frames, height, width = control.shape
        if channels != self.config.control_channels:
            raise ValueError(f"control: got {channels} channels, expected {self.config.control_channels}")
        pixels = F.pixel_unshuffle(control[0].transpose(0, 1).to(self.device, self.dtype), PATCH[1])
        tokens = pixels.flatten(2).transpose(1, 2).flatten(0, 1).unsqueeze(0)  # [1, L, 384 * 4], (f, h, w) order
        p = self.patch_embedding_wancamctrl(tokens)
        p = p + self.c2ws_hidden_states_layer2(F.silu(self.c2ws_hidden_states_layer1(p)))
        grid = (frames, height // PATCH[1], width // PATCH[2])
        return ChunkInputs(tuple(block.view(p) for block in self.local_blocks), rotary.to(self.device), grid)

    def embed(self, latents: Tensor, condition: Tensor) -> Tensor:
        """First stage.  latents: [1, C, c, h, w].  condition: [1, in_dim - C, c, h, w], mask first.  [1, L, D] fp32."""
        x = torch.cat([latents.to(self.dtype), condition.to(self.dtype)], dim=1)
        return self.patch_embedding(x).flatten(2).transpose(1, 2).float()

    def forward(self, hidden: Tensor, time: StepTime, chunk: ChunkInputs, text: TextKV, ring: KVRing) -> Tensor:
        """hidden: [1, L, D] fp32.  Returns the same, or on the last stage the flow [1, C, c, h, w] fp32."""
        for layer, (block, kv) in enumerate(zip(self.local_blocks, text, strict=True)):
            hidden = block(hidden, time.modulation, chunk.rotary, chunk.views[layer], kv, LayerKV(ring, layer))
        return self.head(hidden, time.embedding, chunk.grid) if self.last else hidden

    def write_kv(self, hidden: Tensor, time: StepTime, chunk: ChunkInputs, text: TextKV, ring: KVRing) -> Tensor | None:
        """The clean pass: `forward` for its keys and values alone.

        The last stage stops after its last block's keys and values and returns None: nobody reads the flow.
        """
        blocks = self.local_blocks
        for layer, block in enumerate(blocks[:-1] if self.last else blocks):
            view, kv = chunk.views[layer], LayerKV(ring, layer)
            hidden = block(hidden, time.modulation, chunk.rotary, view, text[layer], kv)
        if not self.last:
            return hidden
        blocks[-1].write_kv(hidden, time.modulation, chunk.rotary, LayerKV(ring, len(blocks) - 1))
        return None
