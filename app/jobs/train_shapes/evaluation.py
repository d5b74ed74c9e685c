"""Stage `evaluate`: generates videos of held-out prompts with diffusers' own WanPipeline and lets the reader judge
them.

The prompts show held-out shapes in wordings half of which are held out too. Noise of prompt i comes from seed i on
the CPU, so that any machine draws the same.
"""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import AutoencoderKLWan, WanPipeline

from app.jobs.train_shapes.grammar import held_out_prompts
from app.jobs.train_shapes.layout import FRAMES, SIDE
from app.jobs.train_shapes.reader import Reading, agrees, all_right, read
from app.jobs.train_shapes.recipe import Recipe
from app.jobs.train_shapes.scene import Scene
from app.jobs.train_shapes.sheet import write_sheet
from app.jobs.train_shapes.vae_training import held_out_psnr

GUIDANCE = 5.0
SHEET_PROMPTS = 16


def generate(pipeline: WanPipeline, prompts: list[str], steps: int, batch: int) -> np.ndarray:
    """[N, 17, 128, 128, 3] float32 in [0, 1], text at the pipeline's default length of 512."""
    videos = []
    for start in range(0, len(prompts), batch):
        part = prompts[start : start + batch]
        generators = [torch.Generator("cpu").manual_seed(start + i) for i in range(len(part))]
        options = {
            "height": SIDE,
            "width": SIDE,
            "num_frames": FRAMES,
            "num_inference_steps": steps,
            "guidance_scale": GUIDANCE,
        }
        videos.append(pipeline(prompt=part, generator=generators, output_type="np", **options).frames)
    return np.concatenate(videos)


def score(readings: list[Reading], prompts: list[tuple[str, Scene]]) -> dict[str, Any]:
    """Shares of videos with an attribute right, and the prompts that went wrong."""
    agreements = [agrees(reading.scene, scene) for reading, (_, scene) in zip(readings, prompts, strict=True)]
    names = sorted({name for agreement in agreements for name in agreement})
    shares = {name: float(np.mean([a[name] for a in agreements if name in a])) for name in names}
    drifts = [reading.colour_drift for reading in readings]
    wrong = [
        f"{text}: {', '.join(name for name, right in agreement.items() if not right)}"
        for (text, _), agreement in zip(prompts, agreements, strict=True)
        if not all_right(agreement)
    ]
    return {
        "all_right": float(np.mean([all_right(agreement) for agreement in agreements])),
        "attribute_right": shares,
        "colour_drift_mean": float(np.mean(drifts)),
        "colour_drift_max": float(np.max(drifts)),
        "wrong": wrong,
    }


def evaluate(out: Path, recipe: Recipe, seed: int, device: torch.device) -> dict[str, Any]:
    """Judges the checkpoint in `out`; writes `out/evaluation.json` and `out/sheet.png`, returns the numbers."""
    pipeline = WanPipeline.from_pretrained(out, dtype=torch.float32).to(device)
    pipeline.set_progress_bar_config(disable=True)
    prompts = held_out_prompts(seed, recipe.evaluation_prompts)
    texts = [text for text, _ in prompts]
    report: dict[str, Any] = {"prompts": len(prompts), "guidance": GUIDANCE, "device": device.type, "steps": {}}
    for steps in recipe.evaluation_steps:
        started = time.monotonic()
        videos = generate(pipeline, texts, steps, batch=64 if device.type == "cuda" else 1)
        seconds = time.monotonic() - started
        if steps == max(recipe.evaluation_steps):
            write_sheet(out / "sheet.png", texts[:SHEET_PROMPTS], videos[:SHEET_PROMPTS])
        with ThreadPoolExecutor() as pool:
            readings = list(pool.map(read, videos))
        report["steps"][str(steps)] = {"seconds_a_video": seconds / len(prompts), **score(readings, prompts)}
        print(f"evaluate: {steps} steps {json.dumps(report['steps'][str(steps)], indent=1)}", flush=True)
    report["vae_psnr_db"] = held_out_psnr(
        AutoencoderKLWan.from_pretrained(out / "vae", dtype=torch.float32).to(device),
        recipe.vae.held_out_clips,
        seed,
    )
    (out / "evaluation.json").write_text(json.dumps(report, indent=1))
    print(f"evaluate: vae psnr {report['vae_psnr_db']:.2f} dB", flush=True)
    return report
