"""One pipeline stage of a Wan transformer: a block range, the first with the embedding, the last with the head.

Blocks, embeddings and head are diffusers' own modules called in the order of `WanTransformer3DModel.forward`, so a
chain of stages equals the whole model bit for bit. Two things are hoisted out of the step: the rotary table depends
on the shape only, and the cross-attention keys and values on the prompt only.

Axes: B batch (always 1: a branch is computed alone), T latent tokens, L text tokens, D model width, C latent channels,
F latent frames, H/W latent height and width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from diffusers import WanTransformer3DModel
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.transformers.transformer_wan import WanAttention
from torch import Tensor, nn
from torch._inductor import config as inductor_config

TextKV = tuple[tuple[Tensor, Tensor], ...]
"""Cross-attention key and value of each local block: [B, L, heads, head_dim], model dtype."""

MAX_COMPILED_SHAPES = 256
"""Shapes one process compiles blocks for; a request of one more fails.  A shape takes seconds once, and a megabyte."""

REPEATABLE = {"deterministic": True} if hasattr(inductor_config, "deterministic") else {}
"""Inductor chooses kernels by rules instead of by timing them on the device: each process that timed them for itself
would sum in an order of its own, and topologies would differ by rounding.  torch 2.9 has no such choice."""

RunBlocks = Callable[[Tensor, Callable[[Tensor], Tensor]], Tensor]
"""Given the hidden state and the block stack, returns the stack's output: the seam of the step cache."""


class _TextKVProcessor:
    """Cross-attention on keys and values computed beforehand; the arithmetic of diffusers' `WanAttnProcessor`."""

    def __call__(
        self, attn: WanAttention, hidden: Tensor, kv: tuple[Tensor, Tensor], mask: None, rotary: None
    ) -> Tensor:
        query = attn.norm_q(attn.to_q(hidden)).unflatten(2, (attn.heads, -1))
        out = dispatch_attention_fn(query, *kv, attn_mask=None, dropout_p=0.0, is_causal=False)
        return attn.to_out[0](out.flatten(2, 3).type_as(query))


@dataclass(frozen=True)
class Conditioning:
    """What a stage computes once a request and branch."""

    text: TextKV
    rotary: tuple[Tensor, Tensor]
    """Cosine and sine, [1, T, 1, head_dim] fp32."""
    grid: tuple[int, int, int]
    """Tokens along frames, height and width; T is their product."""


@dataclass(frozen=True)
class StepTime:
    """The timestep's embeddings; both branches of a step share them."""

    embedding: Tensor
    """[B, D], for the head."""
    modulation: Tensor
    """[B, 6, D], for the blocks."""


class WanStage(nn.Module):
    """A block range of one expert.

    model: as `checkpoint.load_expert` gives it: only this stage's blocks, the patch embedding only on the first stage,
    norm_out, proj_out and scale_shift_table only on the last.
    dtype: the model dtype; some modules are fp32 all the same, as in diffusers.
    """

    def __init__(
        self,
        model: WanTransformer3DModel,
        dtype: torch.dtype,
        *,
        first: bool,
        last: bool,
        compile_blocks: bool = False,
    ) -> None:
        super().__init__()
        self.model, self.dtype, self.first, self.last = model, dtype, first, last
        self.width: int = model.config.num_attention_heads * model.config.attention_head_dim
        if compile_blocks:
            # One graph serves all blocks, each shape counts once; behind the limit torch would go on uncompiled, with
            # other bits.
            torch._dynamo.config.recompile_limit = MAX_COMPILED_SHAPES
            torch._dynamo.config.fail_on_recompile_limit_hit = True
        for block in model.blocks:
            block.attn2.set_processor(_TextKVProcessor())
            if compile_blocks:
                # Kernels of their own for each shape: with kernels for any shape, which torch makes once it has seen
                # two, the bits of a request could depend on the requests before it.
                block.compile(dynamic=False, options=REPEATABLE)

    def prepare(self, text: Tensor, latent_shape: Sequence[int]) -> Conditioning:
        """text: [B, L, text_dim] prompt embeddings.  latent_shape: (B, C, F, H, W), divisible by the patch size."""
        embedded = self.model.condition_embedder.text_embedder(text.to(self.dtype))
        kv = []
        for block in self.model.blocks:
            attn = block.attn2
            key = attn.norm_k(attn.to_k(embedded)).unflatten(2, (attn.heads, -1))
            kv.append((key, attn.to_v(embedded).unflatten(2, (attn.heads, -1))))
        patch = self.model.config.patch_size
        grid = tuple(size // p for size, p in zip(latent_shape[2:], patch, strict=True))
        rotary = self.model.rope(torch.empty(tuple(latent_shape), device="meta"))
        return Conditioning(tuple(kv), rotary, grid)

    def time(self, timestep: Tensor) -> StepTime:
        """timestep: [B], the scheduler's own dtype."""
        embedder = self.model.condition_embedder
        signal = embedder.timesteps_proj(timestep)
        signal = signal.to(next(embedder.time_embedder.parameters()).dtype)
        embedding = embedder.time_embedder(signal).to(self.dtype)
        return StepTime(embedding, embedder.time_proj(embedder.act_fn(embedding)).unflatten(1, (6, -1)))

    def forward(self, x: Tensor, cond: Conditioning, time: StepTime, run: RunBlocks | None = None) -> Tensor:
        """x: latents [B, C, F, H, W] on the first stage, else the hidden state [B, T, D] of the stage before.

        run: calls the block stack, or predicts its output; None calls it.
        Returns the hidden state [B, T, D], or on the last stage the prediction [B, C, F, H, W]; model dtype.
        """
        hidden = self._embed(x) if self.first else x
        stack = self._stack(cond, time)
        hidden = stack(hidden) if run is None else run(hidden, stack)
        return self._project(hidden, cond.grid, time) if self.last else hidden

    def _stack(self, cond: Conditioning, time: StepTime) -> Callable[[Tensor], Tensor]:
        def blocks(hidden: Tensor) -> Tensor:
            for block, kv in zip(self.model.blocks, cond.text, strict=True):
                hidden = block(hidden, kv, time.modulation, cond.rotary)
            return hidden

        return blocks

    def _embed(self, latents: Tensor) -> Tensor:
        return self.model.patch_embedding(latents.to(self.dtype)).flatten(2).transpose(1, 2).contiguous()

    def _project(self, hidden: Tensor, grid: tuple[int, int, int], time: StepTime) -> Tensor:
        shift, scale = (self.model.scale_shift_table + time.embedding.unsqueeze(1)).chunk(2, dim=1)
        hidden = (self.model.norm_out(hidden.float()) * (1 + scale) + shift).type_as(hidden)
        patches = self.model.proj_out(hidden).reshape(hidden.shape[0], *grid, *self.model.config.patch_size, -1)
        return patches.permute(0, 7, 1, 4, 2, 5, 3, 6).flatten(6, 7).flatten(4, 5).flatten(2, 3)
