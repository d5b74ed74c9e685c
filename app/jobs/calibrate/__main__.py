"""Entry point: `python -m app.jobs.calibrate [STAGE] --out FOLDER ...`, plainly or as the entrypoint of a Ray job.

Measures a step-cache profile for one model and request shape; see `calibration` for the stages.  The profile ends in
FOLDER/profile; `python -m app.jobs.freeze` freezes it, `python -m app.jobs.accept` qualifies it.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from app.jobs.calibrate.calibration import STAGES, Calibration
from app.jobs.calibrate.collect import PIPELINES
from app.jobs.calibrate.settings import CalibrationSettings, keep_settings
from app.jobs.clip_settings import ClipSettings
from app.jobs.prompt_set import PromptSet
from app.jobs.provenance import provenance
from deployments.stage_cache.profile import topology_name
from deployments.stage_cache.skip_schedule import SkipLimits
from deployments.stage_cache.variant import refuse_unsupported
from deployments.wan.checkpoint import open_checkpoint
from deployments.wan.checkpoint_files import read_json

TOPOLOGIES = {topology_name(pp, cfg): (pp, cfg) for pp in PIPELINES for cfg in (1, 2)}


def main(arguments: list[str] | None = None) -> None:
    """Runs one stage or all."""
    options = _parser().parse_args(arguments)
    checkpoint = open_checkpoint(options.checkpoint, options.revision)
    refuse_unsupported(
        read_json(checkpoint.folder, "model_index.json"),
        checkpoint.transformer_config("transformer"),
        options.dtype,
    )
    settings = CalibrationSettings(
        profile_id=options.profile_id,
        checkpoint=options.checkpoint,
        revision=options.revision,
        dtype=options.dtype,
        on_gpu=options.device == "cuda",
        clip=ClipSettings(
            width=options.width,
            height=options.height,
            num_frames=options.frames,
            num_inference_steps=options.steps,
            guidance_scale=options.guidance,
            flow_shift=options.flow_shift or checkpoint.flow_shift,
            negative_prompt=options.negative_prompt,
            max_sequence_length=options.max_sequence_length,
        ),
        prompts=PromptSet.read(options.prompts).first(options.first_prompts, options.first_seeds),
        signal=options.signal,
        predictor=options.predictor,
        limits=SkipLimits(
            warmup_steps=options.warmup, cooldown_steps=options.cooldown, max_consecutive=1, min_anchors=2
        ),
        hits=tuple(options.hits),
        sweep_videos=options.sweep_videos,
        sweep_stride=options.sweep_stride,
        masks=options.masks,
        swap_videos=options.swap_videos,
        swap_trials=options.swap_trials,
        timing_pairs=options.timing_pairs,
    )
    keep_settings(options.out, settings)
    calibration = Calibration(options.out, settings, options.workers, options.decoder_threads)
    wanted = STAGES if options.stage == "all" else (options.stage,)
    if "collect" in wanted:
        calibration.collect()
    if "sweep" in wanted:
        calibration.sweep()
    if "search" in wanted:
        calibration.search()
    if "gates" in wanted:
        status = calibration.gates(
            [TOPOLOGIES[name] for name in options.topologies], provenance(settings.on_gpu, options.source_commit)
        )
        print(f"{options.out}/profile: {status.value if status else 'topologies are missing'} once frozen", flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m app.jobs.calibrate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("stage", choices=("all", *STAGES), nargs="?", default="all")
    add("--out", type=Path, required=True, help="folder of this run; a stage goes on where it stopped")
    add("--profile-id", required=True)
    add("--checkpoint", required=True, help="Diffusers-layout folder, or a hub id with --revision")
    add("--revision")
    add("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--workers", type=int, default=os.cpu_count() or 1, help="processes; on GPUs one a card is usual")
    add("--decoder-threads", type=int, default=os.cpu_count() or 1, help="of timed requests on a CPU")
    add("--width", type=int, default=512)
    add("--height", type=int, default=512)
    add("--frames", type=int, default=17)
    add("--steps", type=int, default=50)
    add("--guidance", type=float, default=5.0)
    add("--flow-shift", type=float, help="default: the checkpoint's")
    add("--negative-prompt", default="")
    add("--max-sequence-length", type=int, default=512)
    add("--prompts", type=Path, required=True, help="a prompt set with purpose calibration")
    add("--first-prompts", type=int, help="take only so many prompts (a trial run)")
    add("--first-seeds", type=int, help="take only so many seeds (a trial run)")
    add("--signal", choices=("e", "e0"), default="e")
    add("--predictor", choices=("hold", "scaled", "linear", "ls2"), default="ls2")
    add("--warmup", type=int, default=6, help="first steps that are full")
    add("--cooldown", type=int, default=8, help="last steps that are full")
    add("--hits", type=int, nargs="+", default=[8, 9, 10], help="numbers of reused steps to try")
    add("--sweep-videos", type=int, default=4)
    add("--sweep-stride", type=int, default=1, help="2 sweeps every other step")
    add("--masks", type=int, default=20, help="random schedules that check the additive model")
    add("--swap-videos", type=int, default=8)
    add("--swap-trials", type=int, default=12)
    add("--timing-pairs", type=int, default=48, help="timed pairs in each topology")
    add("--topologies", nargs="+", choices=tuple(TOPOLOGIES), default=tuple(TOPOLOGIES), help="time only these now")
    add("--source-commit", help="default: asked of git")
    return parser


if __name__ == "__main__":
    main()
