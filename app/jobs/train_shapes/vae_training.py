"""Stage `vae`: trains the autoencoder on clips drawn as it goes, then fits the latent statistics and measures PSNR on
held-out clips.

Loss on pixels in [-1, 1]: mean absolute error + 4 x mean squared error + half the absolute error of the differences
between neighbours in x and y, plus a small KL. Whole clips of the served length, because colours drift along time in
a model that saw shorter ones.
"""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKLWan
from torch import Tensor, nn

from app.jobs.train_shapes.checkpointing import Average, finite, rate_at, resume_training, save_training
from app.jobs.train_shapes.clips import draw_clips, seed_of
from app.jobs.train_shapes.models import new_vae
from app.jobs.train_shapes.muon import muon_and_adamw, set_rate
from app.jobs.train_shapes.pace import Pace
from app.jobs.train_shapes.recipe import VaeRecipe
from app.jobs.train_shapes.renderer import draw
from app.jobs.train_shapes.whole_clip import WholeClip, norm_silu_pad, to_channels_last


def reconstruction_loss(out: Tensor, clip: Tensor) -> tuple[Tensor, Tensor]:
    """(loss, mean squared error) of [N, 3, T, H, W] fp32 in [-1, 1]."""
    error = out - clip
    squared = error.square().mean()
    edges = (error[..., 1:] - error[..., :-1]).abs().mean() + (error[..., 1:, :] - error[..., :-1, :]).abs().mean()
    return error.abs().mean() + 4 * squared + 0.5 * edges, squared


def psnr(squared_error: float) -> float:
    """dB for a mean squared error of pixels in [-1, 1]; the peak is 2."""
    return 10 * math.log10(4 / max(squared_error, 1e-12))


def hidden_convolutions(vae: AutoencoderKLWan) -> list[nn.Parameter]:
    """Weights of all convolutions but the first and last ones of encoder and decoder, whose shapes are those of
    pixels and latents."""
    ends = ("conv_in", "conv_out", "quant_conv")
    return [
        p
        for name, p in vae.named_parameters()
        if p.ndim >= 4 and p.shape[1] > 1 and not any(end in name for end in ends)
    ]


def train_vae(recipe: VaeRecipe, out: Path, seed: int, device: torch.device, pace: Pace) -> dict[str, Any]:
    """Trains up to `pace.steps` steps, resuming from `out/vae_state.pt`; writes `out/vae` (fp16) and returns the
    measured numbers."""
    torch.manual_seed(seed_of(seed, "vae weights"))
    vae = new_vae(recipe).to(device)
    on_gpu = device.type == "cuda"
    drawing, norm = (
        (torch.compile(draw, dynamic=False), torch.compile(norm_silu_pad, dynamic=False))
        if on_gpu
        else (draw, norm_silu_pad)
    )
    if on_gpu:
        torch.backends.cudnn.benchmark = True
        torch.backends.cuda.matmul.allow_tf32 = True
        torch._dynamo.config.cache_size_limit = 64  # one entry for each width and resolution
        to_channels_last(vae)
    whole = WholeClip(vae, norm)
    optimizers = muon_and_adamw(hidden_convolutions(vae), vae.parameters(), recipe.rate, fused=on_gpu)
    average = Average(vae, recipe.ema)
    state_file = out / "vae_state.pt"
    losses = resume_training(state_file, vae, average, optimizers, pace)

    def save() -> None:
        save_training(state_file, vae, average, optimizers, losses, pace.steps)

    squared = torch.zeros(())
    while pace.goes_on():
        step = pace.step
        _, clip = draw_clips(recipe.batch, seed_of(seed, "vae", step), device, drawing=drawing)
        generator = torch.Generator(device).manual_seed(seed_of(seed, "vae noise", step))
        if on_gpu:
            clip = clip.contiguous(memory_format=torch.channels_last_3d)
        with torch.autocast(device.type, torch.bfloat16, enabled=on_gpu):
            mean, log_variance = whole.encode(clip)
            noise = torch.randn(mean.shape, device=device, generator=generator)
            latents = mean + noise * torch.exp(0.5 * log_variance)
            reconstruction = whole.decode(latents)
        loss, squared = reconstruction_loss(reconstruction, clip)
        squared = squared.detach()
        loss = loss + recipe.kl_weight * 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).mean()
        set_rate(optimizers, recipe.rate * rate_at(step, pace.steps, recipe.warmup))
        vae.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        average.update(step)
        losses.append(loss.detach())
        if pace.reports():
            print(
                f"vae: step {step} of {pace.steps} loss {finite(loss, step):.4f} psnr {psnr(float(squared)):.2f} dB "
                f"{pace.seconds_a_step * 1e3:.0f} ms a step",
                flush=True,
            )
        if pace.saves():
            losses = [float(x) for x in losses]
            save()
    losses = [float(x) for x in losses]
    save()
    trained = average.module
    fit_latent_statistics(trained, seed, device)
    trained.half().save_pretrained(out / "vae")
    report = {
        "stage": "vae",
        "steps": pace.steps,
        "loss_first": losses[0],
        "loss_last": sum(losses[-50:]) / len(losses[-50:]),
        "seconds": time.monotonic() - pace.started,
    }
    report["psnr_db"] = held_out_psnr(
        AutoencoderKLWan.from_pretrained(out / "vae", dtype=torch.float32).to(device), recipe.held_out_clips, seed
    )
    (out / "vae_report.json").write_text(
        json.dumps({**report, "losses": losses[:: max(1, len(losses) // 200)]}, indent=1)
    )
    print(f"vae: {report}", flush=True)
    return report


@torch.no_grad()
def fit_latent_statistics(vae: AutoencoderKLWan, seed: int, device: torch.device, clips: int = 256) -> None:
    """Sets latents_mean and latents_std of `vae` from training clips (fewer on a CPU)."""
    whole = WholeClip(vae)
    batch = 16 if device.type == "cuda" else 1
    rounds = clips // batch if device.type == "cuda" else 2
    means = torch.cat(
        [whole.encode(draw_clips(batch, seed_of(seed, "statistics", i), device)[1])[0].cpu() for i in range(rounds)]
    )
    flat = means.transpose(0, 1).flatten(1).double()
    vae.register_to_config(latents_mean=flat.mean(1).tolist(), latents_std=flat.std(1).clamp_min(1e-3).tolist())


@torch.no_grad()
def held_out_psnr(vae: AutoencoderKLWan, clips: int, seed: int) -> float:
    """dB over all pixels of `clips` held-out clips, through the chunk loop that serves; latents are the posterior's
    mean, pixels are clamped."""
    squared = []
    for i in range(clips):
        _, clip = draw_clips(1, seed_of(seed, "psnr", i), vae.device, held_out=True)
        out = vae.decode(vae.encode(clip).latent_dist.mode()).sample
        squared.append(float((out - clip).square().mean()))
    return psnr(sum(squared) / len(squared))
