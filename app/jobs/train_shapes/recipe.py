"""Sizes and training settings: `FULL` is what the bundled checkpoint was trained with, `SMOKE` runs through on a CPU
in seconds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class VaeRecipe:
    """Autoencoder: widths are `base_dim * dim_mult`, from full resolution to 1/8."""

    base_dim: int
    dim_mult: tuple[int, int, int, int]
    steps: int
    batch: int  # clips of 17 frames
    rate: float  # AdamW, after warm-up, falling by a cosine
    warmup: int  # steps
    kl_weight: float = 5e-5  # on the mean KL of a latent number, against L1 of pixels in [-1, 1]
    ema: float = 0.998
    held_out_clips: int = 64


@dataclass(frozen=True)
class DenoiserRecipe:
    """Transformer and text encoder, trained together on latents made once."""

    heads: int
    head_dim: int
    layers: int
    ffn_dim: int
    text_dim: int
    text_layers: int
    clips: int  # encoded before training
    captions: int  # wordings kept of each clip
    steps: int
    batch: int
    rate: float
    warmup: int
    ema: float = 0.999
    prompt_dropout: float = 0.1  # share of clips trained with the empty prompt, the negative side of guidance
    shift: float = 3.0  # of the times, as the scheduler's flow_shift


@dataclass(frozen=True)
class Recipe:
    vae: VaeRecipe
    denoiser: DenoiserRecipe
    evaluation_prompts: int
    evaluation_steps: tuple[int, ...]  # solver steps, each measured


FULL = Recipe(
    vae=VaeRecipe(base_dim=8, dim_mult=(2, 4, 8, 8), steps=4810, batch=16, rate=2e-3, warmup=100),
    denoiser=DenoiserRecipe(
        heads=7,
        head_dim=32,
        layers=8,
        ffn_dim=512,
        text_dim=128,
        text_layers=2,
        clips=40_000,
        captions=4,
        steps=2070,
        batch=384,
        rate=2e-3,
        warmup=100,
    ),
    evaluation_prompts=64,
    evaluation_steps=(50, 20),
)
SMOKE = Recipe(
    vae=VaeRecipe(base_dim=4, dim_mult=(1, 1, 2, 2), steps=2, batch=1, rate=1e-3, warmup=2, held_out_clips=1),
    denoiser=DenoiserRecipe(
        heads=2,
        head_dim=16,
        layers=8,
        ffn_dim=64,
        text_dim=32,
        text_layers=1,
        clips=4,
        captions=2,
        steps=4,
        batch=2,
        rate=1e-3,
        warmup=2,
    ),
    evaluation_prompts=1,
    evaluation_steps=(2,),
)
