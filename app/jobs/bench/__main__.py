"""``python -m app.jobs.bench``: how fast the pipeline is, against diffusers' `WanPipeline` and over topologies.

    python -m app.jobs.bench --checkpoint checkpoints/wan-shapes --shapes 128x128x17 --dtype float32
    python -m app.jobs.bench --random wan2.1-1.3b --shapes 512x512x17 832x480x81 --compile none blocks
    python -m app.jobs.bench --random wan2.1-1.3b --shapes 512x512x17 --topologies all
    python -m app.jobs.bench --random wan2.1-1.3b --shapes 512x512x17 --serve

Without `--topologies` and `--serve`: `WanPipeline` and ours in one process on the same weights, in turns (A B B A),
after a warm-up.  With `--random` the weights have a real model's shape and are noise, and so are the videos.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import torch

from app.jobs.bench.bench_request import BenchRequest
from app.jobs.bench.comparison import as_json, compare, format_rows
from app.jobs.bench.contestants import Contestant, DiffusersPipeline, Reusing, Worldstage
from app.jobs.bench.machine import describe_machine, one_line
from app.jobs.bench.planned_memory import format_memory, planned_bytes
from app.jobs.bench.random_checkpoint import SIZES, write_random_checkpoint
from app.jobs.bench.reuse import reused_steps
from app.jobs.bench.serve_overhead import format_overhead, measure_overhead
from app.jobs.bench.topologies import (
    TopologyResult,
    TopologySetup,
    format_topologies,
    latents_agree,
    measure_topology,
    parse_topologies,
)
from app.jobs.bench.video_shape import VideoShape
from deployments.wan.memory_plan import DTYPES

Parsed = TypeVar("Parsed")


def _shape(text: str) -> VideoShape:
    return _argument(VideoShape.parse, text)


def _topologies(text: str) -> tuple[tuple[int, int], ...]:
    return _argument(parse_topologies, text)


def _argument(parse: Callable[[str], Parsed], text: str) -> Parsed:
    """argparse shows the message of its own error type alone."""
    try:
        return parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m app.jobs.bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    weights = parser.add_mutually_exclusive_group(required=True)
    weights.add_argument("--checkpoint", type=Path, help="Diffusers-layout folder")
    weights.add_argument("--random", choices=SIZES, help="random weights of this shape, in a temporary folder")
    parser.add_argument("--full-vae", action="store_true", help="with --random: the VAE of the real size too")
    parser.add_argument("--shapes", nargs="+", type=_shape, required=True, metavar="WxHxF")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=1, help="each side runs twice as often (default: %(default)s)")
    parser.add_argument("--guidance-scale", type=float, default=5.0)
    parser.add_argument("--max-sequence-length", type=int, default=512)
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--vae-dtype", choices=DTYPES, default="float32")
    parser.add_argument("--compile", nargs="+", choices=["none", "blocks"], default=["none"], help="of our side")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, help="torch threads of each process on a CPU")
    parser.add_argument("--topologies", type=_topologies, help="all, or such as pp1cfg1,pp2cfg2")
    parser.add_argument("--loads", nargs="+", type=int, default=[1, 2, 4], help="requests in flight, with --topologies")
    parser.add_argument(
        "--reuse", type=int, default=0, metavar="N", help="also time requests whose step cache predicts N steps"
    )
    parser.add_argument("--serve", action="store_true", help="what a request through HTTP takes beside its phases")
    parser.add_argument("--out", type=Path, help="JSON file for everything measured")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0; 1 when latents that must be equal are not."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.loads[0] != 1:
        parser.error(f"--loads: got {options.loads}, expected 1 first: the others are compared with it")
    if options.topologies and len(options.compile) > 1:
        parser.error(f"--compile: got {options.compile}, expected one mode with --topologies")
    try:
        reused_steps(options.steps, options.reuse)
    except ValueError as error:
        parser.error(f"--reuse: {error}")
    if options.threads:
        torch.set_num_threads(options.threads)
    machine = describe_machine()
    _print(one_line(machine))
    results: dict[str, Any] = {"machine": machine, "arguments": {k: str(v) for k, v in vars(options).items()}}
    with _weights(options) as folder:
        if options.topologies:
            agree = _topologies_mode(options, folder, results)
        elif options.serve:
            agree = _serve_mode(options, folder, results)
        else:
            agree = _comparison_mode(options, folder, results)
    if options.out:
        options.out.write_text(json.dumps(results, indent=1))
        _print(f"written to {options.out}")
    return 0 if agree else 1


def _print(line: str) -> None:
    print(line, flush=True)


@contextmanager
def _weights(options: argparse.Namespace) -> Iterator[Path]:
    if options.checkpoint:
        yield options.checkpoint
        return
    with tempfile.TemporaryDirectory(prefix="bench-weights-") as folder:
        write_random_checkpoint(
            Path(folder),
            SIZES[options.random],
            full_vae=options.full_vae,
            dtype=DTYPES[options.dtype],
            device=torch.device(options.device),
        )
        yield Path(folder)


def _requests(options: argparse.Namespace) -> tuple[BenchRequest, ...]:
    return tuple(
        BenchRequest(shape, options.steps, 0, options.guidance_scale, options.max_sequence_length)
        for shape in options.shapes
    )


def _comparison_mode(options: argparse.Namespace, folder: Path, results: dict[str, Any]) -> bool:
    device = torch.device("cuda", 0) if options.device == "cuda" else torch.device("cpu")
    contestants: list[Contestant] = [DiffusersPipeline(folder, options.dtype, options.vae_dtype, device)]
    ours = [Worldstage(folder, options.dtype, options.vae_dtype, device, mode) for mode in options.compile]
    contestants += ours
    if options.reuse:
        contestants += [Reusing(native, options.reuse) for native in ours]
    results["comparison"] = []
    for request in _requests(options):
        rows = compare(contestants, request, options.repeats, _print)
        _print(f"\n{format_rows(request, rows)}\n")
        results["comparison"].append(as_json(request, rows))
    for contestant in contestants:
        contestant.close()
    return True


def _topologies_mode(options: argparse.Namespace, folder: Path, results: dict[str, Any]) -> bool:
    requests = _requests(options)
    setup = TopologySetup(
        folder=str(folder),
        requests=requests,
        loads=tuple(options.loads),
        dtype=options.dtype,
        compile_blocks=options.compile == ["blocks"],
        on_gpu=options.device == "cuda",
        threads=options.threads,
        reuse=options.reuse,
    )
    measured: list[list[TopologyResult]] = []
    for pp, cfg in options.topologies:
        _print(f"pp{pp}cfg{cfg} ...")
        measured.append(measure_topology(setup, pp, cfg))
    by_shape = [[topology[index] for topology in measured] for index in range(len(requests))]
    _print("\n\n".join(["", *map(format_topologies, by_shape)]))
    if setup.on_gpu:
        planned = {
            f"pp{pp}cfg{cfg}": planned_bytes(
                str(folder), options.dtype, pp, cfg, max(options.loads), options.shapes, options.max_sequence_length
            )
            for pp, cfg in options.topologies
        }
        _print("\n" + format_memory(by_shape[0], planned))
        results["planned_bytes"] = planned
    results["topologies"] = [[asdict(result) for result in shape] for shape in by_shape]
    return all(latents_agree(shape) for shape in by_shape)


def _serve_mode(options: argparse.Namespace, folder: Path, results: dict[str, Any]) -> bool:
    rows = measure_overhead(
        folder, _requests(options), options.dtype, options.compile[0], options.device, options.repeats
    )
    _print(f"\n{format_overhead(rows)}")
    results["serve"] = [asdict(row) for row in rows]
    return True


if __name__ == "__main__":
    sys.exit(main())
