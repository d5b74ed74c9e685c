"""From pairs of prompts to the served map of the latent cache: `python -m app.jobs.calibrate_latent_cache STAGE`.

    pairs   scores and judges pairs of prompts; needs the embedder alone      -> FOLDER/pairs.json
            (--embedder text_encoder: the checkpoint's own; its fingerprint and width go into the Serve config)
    videos  makes and compares the videos; needs the checkpoint alone         -> FOLDER/videos.json
    map     puts both together                                                -> FOLDER/map.json, table.md, plot.png
    all     one after the other

    python -m app.jobs.calibrate_latent_cache all --checkpoint checkpoints/wan-shapes --out latent-map \\
        --width 128 --height 128 --num-frames 17 --steps 20 --skip 2 4 6 8

Name map.json as latent_cache.approximate.similarity_map.  Runs plainly or as the entrypoint command of a Ray job.  The
pairs are those of the shapes world; for another model, --prompts names a file in the form of natural_development.txt.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from pydantic import TypeAdapter

from app.config import CacheConfig, VideoModel
from app.jobs.calibrate_latent_cache.damage import Damage, measure, tiers
from app.jobs.calibrate_latent_cache.judgement import JudgedPair, Judgement, judge, rates, threshold
from app.jobs.calibrate_latent_cache.labelled_pairs import natural_pairs, read_pairs, shapes_pairs, shapes_wordings
from app.jobs.calibrate_latent_cache.map_report import write_report
from app.jobs.calibrate_latent_cache.text_states import TextStates
from app.jobs.calibrate_latent_cache.wan_generator import WanGenerator
from app.jobs.provenance import provenance
from app.planning.step_cache_policy import open_policy
from cache_actors.embedder import PACKAGE, Embedder, FolderEmbedder
from cache_actors.latent_config import Floors
from cache_actors.meaning import MEANING_VERSION
from cache_actors.similarity_map import Scope, SimilarityMap
from deployments.wan.checkpoint import fingerprint, open_checkpoint
from deployments.wan.memory_plan import DTYPES
from deployments.wan.solver_spec import SolverSpec

Record = TypeVar("Record")


@dataclass(frozen=True)
class _Videos:
    """What stage `videos` measured, and on what."""

    scope: Scope
    damage: list[Damage]
    date: str
    code: str


def main(arguments: list[str] | None = None) -> None:
    """Runs one stage, or all."""
    options = _parser().parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    stages = {"pairs": _pairs, "videos": _videos, "map": _map}
    for name in stages if options.stage == "all" else (options.stage,):
        stages[name](options)


def _pairs(options: argparse.Namespace) -> None:
    embedder: Embedder
    if options.embedder == "text_encoder":
        torch.set_num_threads(options.threads)
        checkpoint, device = open_checkpoint(options.checkpoint), torch.device(options.device)
        embedder = TextStates(checkpoint, DTYPES[options.dtype], device, options.max_sequence_length)
    else:
        embedder = FolderEmbedder(options.embedder, options.threads)
    own: Path | None = options.prompts
    world = read_pairs(own, "own") if own else shapes_pairs(options.seed, options.scenes)
    wordings = () if own else shapes_wordings()
    natural = [*natural_pairs("development"), *natural_pairs("held_out")]
    judged = judge([*world, *natural], embedder, wordings)
    write(options.out / "pairs.json", Judgement(embedder.fingerprint, MEANING_VERSION, wordings, judged))


def _videos(options: argparse.Namespace) -> None:
    judgement = read(options.out / "pairs.json", Judgement)
    lowest = threshold(judgement.pairs)
    usable = [j for j in judgement.pairs if j.pair.source in ("shapes", "own") and j.serves(lowest)]
    if not usable:
        raise ValueError(f"pairs: none of equal meaning passes the guard from score {lowest}; give more with --prompts")
    torch.set_num_threads(options.threads)
    generator, scope = _generator(options)
    try:
        pairs = [(j.pair.query, j.pair.donor, j.score) for j in _spread(usable, options.pairs)]
        damage = measure(generator, pairs, sorted(options.skip), options.seed)
    finally:
        generator.close()
    source = provenance(options.device == "cuda", options.source_commit)
    write(options.out / "videos.json", _Videos(scope, damage, source.date, source.source_commit))


def _map(options: argparse.Namespace) -> None:
    judgement, videos = read(options.out / "pairs.json", Judgement), read(options.out / "videos.json", _Videos)
    lowest, floors = threshold(judgement.pairs), Floors()
    edges = [round(lowest + (1 - lowest) * part, 2) for part in (0.25, 0.5, 0.75)]
    found = tiers(videos.damage, lowest, edges, floors, videos.date, videos.code)
    served = SimilarityMap(
        format=1,
        scope=videos.scope,
        embedder=judgement.embedder,
        meaning=judgement.meaning,
        wordings=judgement.wordings,
        tiers=tuple(found),
        pairs=rates(judgement.pairs, found[0].min_score),
    )
    (options.out / "map.json").write_text(served.model_dump_json(indent=1) + "\n", encoding="utf-8")
    write_report(options.out, served, judgement.pairs, videos.damage, floors)


def write(path: Path, record: object) -> None:
    """A dataclass as JSON."""
    path.write_bytes(TypeAdapter(type(record)).dump_json(record, indent=1) + b"\n")


def read(path: Path, kind: type[Record]) -> Record:
    """What `write` wrote.  Raises ValueError for an absent or foreign file."""
    try:
        return TypeAdapter(kind).validate_json(path.read_bytes())
    except OSError as error:
        raise ValueError(f"--out: {path} cannot be read: {error}; run the stages before this one first") from error


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m app.jobs.calibrate_latent_cache",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("stage", choices=("pairs", "videos", "map", "all"))
    parser.add_argument("--out", type=Path, required=True, help="folder of what the stages write")
    parser.add_argument("--checkpoint", default="checkpoints/wan-shapes", help="Diffusers-layout folder")
    parser.add_argument(
        "--embedder", default=PACKAGE, help="sentence-transformers folder, that package, or text_encoder"
    )
    parser.add_argument("--prompts", type=Path, help="pairs of your own, in the form of natural_development.txt")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--height", type=int, default=128)
    parser.add_argument("--num-frames", type=int, default=17)
    parser.add_argument("--steps", type=int, default=20, help="solver steps of a request")
    parser.add_argument("--guidance-scale", type=float, default=5.0)
    parser.add_argument("--guidance-scale-2", type=float, help="of the low-noise expert")
    parser.add_argument("--flow-shift", type=float, help="default: the checkpoint's")
    parser.add_argument("--negative-prompt", default="")
    parser.add_argument("--max-sequence-length", type=int, default=512)
    parser.add_argument(
        "--step-cache", help="folder of the served step-cache profile: calibrate with it, for its requests"
    )
    parser.add_argument("--skip", type=int, nargs="+", default=[2, 4, 6, 8], help="steps to try")
    parser.add_argument("--pairs", type=int, default=36, help="pairs of videos compared")
    parser.add_argument("--scenes", type=int, default=150, help="scenes of the shapes world that are judged")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=1, help="of torch on a CPU")
    parser.add_argument("--source-commit", help="default: asked of git")
    return parser


def _spread(usable: list[JudgedPair], count: int) -> list[JudgedPair]:
    """`count` pairs evenly over the range of scores, so that every tier is measured."""
    ordered = sorted(usable, key=lambda j: j.score)
    if len(ordered) <= count:
        return ordered
    return [ordered[round(i * (len(ordered) - 1) / (count - 1))] for i in range(count)]


def _generator(options: argparse.Namespace) -> tuple[WanGenerator, Scope]:
    checkpoint = open_checkpoint(options.checkpoint)
    shift = checkpoint.flow_shift if options.flow_shift is None else options.flow_shift
    solver = SolverSpec(
        checkpoint.scheduler, checkpoint.scheduler_config, options.steps, shift, checkpoint.boundary_ratio
    )
    vae = checkpoint.vae_config
    pixels = int(vae["scale_factor_spatial"])
    second = options.guidance_scale_2
    if second is None and len(checkpoint.experts) == 2:
        second = options.guidance_scale
    weights, policy = fingerprint(checkpoint), None
    if options.step_cache is not None:
        caching = CacheConfig(wan_profile=options.step_cache, allow_unqualified=True)
        model = VideoModel(name="calibrated", checkpoint=options.checkpoint, dtype=options.dtype, cache_config=caching)
        policy = open_policy(caching, model, checkpoint, weights)
        if policy.profile.request.num_inference_steps != options.steps:
            raise ValueError(f"--steps: got {options.steps}, {options.step_cache} is for other requests")
    generator = WanGenerator(
        checkpoint,
        solver,
        latent_shape=(
            1,
            int(vae["z_dim"]),
            (options.num_frames - 1) // int(vae["scale_factor_temporal"]) + 1,
            options.height // pixels,
            options.width // pixels,
        ),
        guidance=(options.guidance_scale, options.guidance_scale if second is None else second),
        negative_prompt=options.negative_prompt,
        max_sequence_length=options.max_sequence_length,
        dtype=options.dtype,
        device=torch.device(options.device),
        step_cache=policy,
    )
    scope = Scope(
        weights=weights,
        width=options.width,
        height=options.height,
        num_frames=options.num_frames,
        num_inference_steps=options.steps,
        scheduler=checkpoint.scheduler,
        flow_shift=shift,
        guidance_scale=options.guidance_scale,
        guidance_scale_2=second,
        dtype=options.dtype,
        max_sequence_length=options.max_sequence_length,
        step_profile=policy.profile.digest if policy else None,
    )
    return generator, scope


if __name__ == "__main__":
    main()
