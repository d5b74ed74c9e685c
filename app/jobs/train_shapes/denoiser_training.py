"""Stage `denoiser`: trains transformer and text encoder together by rectified flow on latents encoded once.

    x_t = (1 - s) x0 + s noise        target v = noise - x0        timestep = 1000 s
    s = shift u / (1 + (shift - 1) u), u logit-normal

as the pipeline's flow scheduler runs it. One in ten clips has the empty prompt, which is what guidance starts from.
Axes: N clips, 16 channels, F = 5 latent frames, 16 x 16; L text places (see `conditioning`).
"""

from __future__ import annotations

import copy
import json
import random
import time
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKLWan, WanPipeline
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

from app.jobs.train_shapes.checkpointing import Average, finite, rate_at, resume_training, save_training
from app.jobs.train_shapes.clips import draw_clips, seed_of
from app.jobs.train_shapes.conditioning import embed, tokenise, use_window
from app.jobs.train_shapes.grammar import caption
from app.jobs.train_shapes.models import new_scheduler, new_text_encoder, new_tokenizer, new_transformer
from app.jobs.train_shapes.muon import muon_and_adamw, set_rate
from app.jobs.train_shapes.pace import Pace
from app.jobs.train_shapes.recipe import DenoiserRecipe
from app.jobs.train_shapes.renderer import draw
from app.jobs.train_shapes.scene import unstate
from app.jobs.train_shapes.whole_clip import WholeClip, norm_silu_pad, to_channels_last


@torch.no_grad()
def encode_clips(
    vae: AutoencoderKLWan,
    recipe: DenoiserRecipe,
    seed: int,
    tokenizer: PreTrainedTokenizerFast,
    held_out: bool = False,
    clips: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Normalised latents [clips, 16, 5, 16, 16] (bf16 on a GPU) and token ids [clips, captions, L], both on the
    autoencoder's device."""
    device, count = vae.device, clips or recipe.clips
    on_gpu = device.type == "cuda"
    norm, drawing = (
        (torch.compile(norm_silu_pad, dynamic=False), torch.compile(draw, dynamic=False))
        if on_gpu
        else (norm_silu_pad, draw)
    )
    whole, batch = WholeClip(vae, norm), 100 if on_gpu else 2
    mean = torch.tensor(vae.config.latents_mean, device=device).view(1, 16, 1, 1, 1)
    std = torch.tensor(vae.config.latents_std, device=device).view(1, 16, 1, 1, 1)
    latents, texts = [], []
    for start in range(0, count, batch):
        part = seed_of(seed, "held-out latents" if held_out else "latents", start)
        scenes, clip = draw_clips(min(batch, count - start), part, device, held_out, drawing)
        with torch.autocast(device.type, torch.bfloat16, enabled=on_gpu):
            x, _ = whole.encode(clip.contiguous(memory_format=torch.channels_last_3d) if on_gpu else clip)
        latents.append(((x - mean) / std).to(torch.bfloat16 if on_gpu else torch.float32))
        rng = random.Random(part)
        texts += [caption(unstate(scene, rng), rng) for scene in scenes for _ in range(recipe.captions)]
    ids = tokenise(tokenizer, texts).view(count, recipe.captions, -1)
    return torch.cat(latents), ids.to(device)


class Batches:
    """Training examples of a step, a function of (seed, step) alone."""

    def __init__(self, latents: Tensor, ids: Tensor, recipe: DenoiserRecipe, seed: int):
        self.latents, self.ids, self.recipe, self.seed = latents, ids, recipe, seed
        self.empty = torch.zeros(ids.shape[-1], dtype=ids.dtype, device=ids.device)
        self.empty[0] = 1  # the end token: what the tokenizer makes of ""

    def at(self, step: int, count: int, dropout: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """x_t and v [N, 16, F, 16, 16] fp32, timestep [N] fp32 in 0..1000, ids [N, L]."""
        device, recipe = self.latents.device, self.recipe
        generator = torch.Generator(device).manual_seed(seed_of(self.seed, "denoiser", step))
        which = torch.randint(len(self.latents), (count,), device=device, generator=generator)
        wording = torch.randint(self.ids.shape[1], (count,), device=device, generator=generator)
        dropped = torch.rand(count, 1, device=device, generator=generator) < dropout
        u = torch.randn(count, device=device, generator=generator).sigmoid()
        s = recipe.shift * u / (1 + (recipe.shift - 1) * u)
        x0 = self.latents[which].float()
        noise = torch.randn(x0.shape, device=device, generator=generator)
        mix = s.view(-1, 1, 1, 1, 1)
        return (
            (1 - mix) * x0 + mix * noise,
            noise - x0,
            1000 * s,
            torch.where(dropped, self.empty, self.ids[which, wording]),
        )


class Denoiser(nn.Module):
    """Text encoder and transformer as one trained function."""

    def __init__(self, recipe: DenoiserRecipe):
        super().__init__()
        self.text_encoder = new_text_encoder(recipe)
        self.transformer = new_transformer(recipe)

    def forward(self, x: Tensor, timestep: Tensor, ids: Tensor) -> Tensor:
        """Predicted v, fp32; arguments as `Batches.at` gives them."""
        return self.transformer(x, timestep, embed(self.text_encoder, ids), return_dict=False)[0].float()


def hidden_matrices(model: Denoiser) -> list[nn.Parameter]:
    """All matrices but embeddings, position biases and the output projection."""
    others = ("shared", "embed_tokens", "relative_attention_bias", "proj_out")
    return [p for name, p in model.named_parameters() if p.ndim == 2 and not any(other in name for other in others)]


def train_denoiser(recipe: DenoiserRecipe, out: Path, seed: int, device: torch.device, pace: Pace) -> dict[str, Any]:
    """Trains up to `pace.steps` steps on latents of `out/vae`, resuming from `out/denoiser_state.pt`; writes the
    remaining folders of the checkpoint (fp16)."""
    on_gpu = device.type == "cuda"
    if not (out / "vae").is_dir():
        raise FileNotFoundError(
            f"out: got {out}, which has no folder 'vae'; run the stage vae with the same --out first"
        )
    torch._dynamo.config.cache_size_limit = 64
    vae = AutoencoderKLWan.from_pretrained(out / "vae", dtype=torch.float32).to(device)
    if on_gpu:
        torch.backends.cudnn.benchmark = True
        to_channels_last(vae)
    tokenizer = new_tokenizer()
    latents, ids = encode_clips(vae, recipe, seed, tokenizer)
    checked = encode_clips(vae, recipe, seed, tokenizer, held_out=True, clips=min(500, recipe.clips))
    print(
        f"denoiser: {len(latents)} clips encoded after {time.monotonic() - pace.started:.0f} s, std "
        f"{float(latents.float().std()):.3f}",
        flush=True,
    )
    torch.manual_seed(seed_of(seed, "denoiser weights"))
    model = Denoiser(recipe).to(device)
    average = Average(model, recipe.ema)
    for transformer in (model.transformer, average.module.transformer):
        use_window(transformer)
    if on_gpu:
        model.transformer.compile_repeated_blocks(fullgraph=True, dynamic=False)
    optimizers = muon_and_adamw(hidden_matrices(model), model.parameters(), recipe.rate, fused=on_gpu)
    batches, check = Batches(latents, ids, recipe, seed), Batches(*checked, recipe, seed)
    state_file = out / "denoiser_state.pt"
    losses = resume_training(state_file, model, average, optimizers, pace)

    def save() -> None:
        save_training(state_file, model, average, optimizers, losses, pace.steps)
        export(average.module, tokenizer, out)

    @torch.no_grad()
    def check_loss() -> float:
        with torch.autocast(device.type, torch.bfloat16, enabled=on_gpu):
            x, v, t, text = check.at(-1, len(check.latents), 0.0)
            return float((average.module(x, t, text) - v).square().mean())

    while pace.goes_on():
        step = pace.step
        x, v, timestep, text = batches.at(step, recipe.batch, recipe.prompt_dropout)
        with torch.autocast(device.type, torch.bfloat16, enabled=on_gpu):
            predicted = model(x, timestep, text)
        loss = (predicted - v).square().mean()
        set_rate(optimizers, recipe.rate * rate_at(step, pace.steps, recipe.warmup))
        model.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        average.update(step)
        losses.append(loss.detach())
        if pace.reports():
            print(
                f"denoiser: step {step} of {pace.steps} loss {finite(loss, step):.4f} held-out {check_loss():.4f} "
                f"{pace.seconds_a_step * 1e3:.0f} ms a step",
                flush=True,
            )
        if pace.saves():
            losses = [float(x) for x in losses]
            save()
    losses = [float(x) for x in losses]
    save()
    report = {
        "stage": "denoiser",
        "steps": pace.steps,
        "loss_first": losses[0],
        "loss_last": sum(losses[-50:]) / len(losses[-50:]),
    }
    report |= {"loss_held_out": check_loss(), "seconds": time.monotonic() - pace.started}
    (out / "denoiser_report.json").write_text(
        json.dumps({**report, "losses": losses[:: max(1, len(losses) // 200)]}, indent=1)
    )
    print(f"denoiser: {report}", flush=True)
    return report


def export(model: nn.Module, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Writes transformer, text encoder, tokenizer, scheduler and model_index.json beside `out/vae`, fp16, as
    WanPipeline reads them."""
    half = copy.deepcopy(model).half()
    pipeline = WanPipeline(
        tokenizer=tokenizer,
        text_encoder=half.text_encoder,
        transformer=half.transformer,
        vae=AutoencoderKLWan.from_pretrained(out / "vae", dtype=torch.float16),
        scheduler=new_scheduler(),
    )
    pipeline.save_pretrained(out)
