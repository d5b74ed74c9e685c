"""Entry point: `python -m app.jobs.train_shapes STAGE --out FOLDER`, plainly or as the entrypoint command of a Ray job.

Stages, in order; each fits ten minutes on one H200 and resumes from its own state in FOLDER when it is started again:

    vae         the autoencoder                                     -> FOLDER/vae
    denoiser    transformer and text encoder                        -> the other folders of the checkpoint
    evaluate    reads generated videos of held-out prompts back     -> FOLDER/evaluation.json, sheet.png
    bundle      copies what WanPipeline loads, and checks its size  -> the folder given with --to
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

from app.jobs.train_shapes.recipe import FULL, SMOKE


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Runs one stage and returns its report, which is also printed and written to FOLDER."""
    parser = argparse.ArgumentParser(
        prog="python -m app.jobs.train_shapes",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("stage", choices=("vae", "denoiser", "evaluate", "bundle"))
    parser.add_argument("--out", type=Path, required=True, help="folder of state, weights and reports")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, help="optimizer steps; default: the recipe's")
    parser.add_argument("--seconds", type=float, help="instead of --steps: as many steps as fit; the number is printed")
    parser.add_argument("--smoke", action="store_true", help="tiny models and a few steps, for a CPU")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--to", type=Path, help="bundle: where the checkpoint goes")
    options = parser.parse_args(arguments)
    if options.steps is not None and options.seconds is not None:
        parser.error("--steps and --seconds: both given, one is allowed; drop one")
    if (options.stage == "bundle") != (options.to is not None):
        parser.error("--to: names the folder of stage bundle, and of no other stage")
    recipe, device = SMOKE if options.smoke else FULL, torch.device(options.device)
    options.out.mkdir(parents=True, exist_ok=True)
    if options.stage in ("vae", "denoiser"):
        from app.jobs.train_shapes.denoiser_training import train_denoiser
        from app.jobs.train_shapes.pace import Pace
        from app.jobs.train_shapes.vae_training import train_vae

        if options.stage == "vae":
            pace = Pace(options.steps or recipe.vae.steps, options.seconds)
            return train_vae(recipe.vae, options.out, options.seed, device, pace)
        pace = Pace(options.steps or recipe.denoiser.steps, options.seconds)
        return train_denoiser(recipe.denoiser, options.out, options.seed, device, pace)
    if options.stage == "evaluate":
        from app.jobs.train_shapes.evaluation import evaluate

        return evaluate(options.out, recipe, options.seed, device)
    from app.jobs.train_shapes.bundle import bundle

    return bundle(options.out, options.to)


if __name__ == "__main__":
    main()
