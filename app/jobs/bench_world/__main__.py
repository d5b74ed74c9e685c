"""``python -m app.jobs.bench_world``: how fast worlds are made, found, parked and brought back, and that bits agree.

    python -m app.jobs.bench_world --random 1.3b --scratch scratch/ --out bench-world.json
    python -m app.jobs.bench_world --random small --device cpu --scratch scratch/ --out bench-world.json

One process measures; three more make the same world again, rebuild it from its journal, and make it on two stages that
share the device.  With `--random` the weights have a real model's shape and are noise: times are real, pictures are
not.  Exit status 1 where bits differ; a missed aim is shown, and fails nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from app.jobs.bench.machine import describe_machine, one_line
from app.jobs.bench_world.lengths import CUT, KEPT, PARKED, TOTAL
from app.jobs.bench_world.measurement import Measured, measure
from app.jobs.bench_world.other_process import Found, Kind, Order, ask
from app.jobs.bench_world.profile import profiled_chunk
from app.jobs.bench_world.table import Row, format_rows, rows
from app.jobs.local_world import LocalWorldModel, WorldSetup
from app.jobs.world_options import add_world_options, setup_of
from deployments.lingbot.checkpoint import open_world_checkpoint
from deployments.lingbot.stream_config import STREAMS, frame_tokens
from deployments.wan.memory_plan import DTYPES


def kv_bytes_of(setup: WorldSetup, chunks: int) -> int:
    """Host memory for the keys and values of so many chunks."""
    checkpoint = open_world_checkpoint(setup.folder, setup.support)
    frames = chunks * (setup.chunk or STREAMS[checkpoint.layout].chunk)
    config, tokens = checkpoint.config, frame_tokens(setup.height, setup.width)
    return 2 * config.num_layers * frames * tokens * config.dim * DTYPES[setup.dtype].itemsize


def bench(options: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """Everything, as plain data."""
    took: dict[str, float] = {}

    def lap(name: str, began: float) -> None:
        took[name] = round(time.perf_counter() - began, 2)
        print(f"{name}: {took[name]:.1f} s", flush=True)

    began = time.perf_counter()
    setup = setup_of(options, scratch, pp=1, max_chunks=TOTAL, kv_bytes=0)
    kept = replace(setup, kv_bytes=kv_bytes_of(setup, KEPT))
    lap("checkpoint", began)
    began = time.perf_counter()
    with LocalWorldModel(kept) as model:
        lap("load", began)
        began = time.perf_counter()
        here = measure(model, options.prompt, options.seed, scratch)
        peak = torch.cuda.max_memory_allocated() if setup.on_gpu else 0
        lap("measurement", began)
        if options.profile:
            options.profile.write_text(profiled_chunk(model))
    found: dict[Kind, Found] = {}
    setups: dict[Kind, WorldSetup] = {"again": setup, "journal": kept, "cut": replace(setup, pp=2)}
    for kind, its in setups.items():
        began = time.perf_counter()
        found[kind] = ask(Order(kind, its, options.prompt, options.seed, tuple(here.journal), scratch / f"{kind}.json"))
        lap(f"other process: {kind}", began)
    return {
        "machine": describe_machine(),
        "model": {"checkpoint": str(setup.folder), "random": options.random, "dtype": setup.dtype},
        "size": f"{setup.height}x{setup.width}",
        "device_bytes_peak": peak,
        "rows": [asdict(row) for row in rows(here.seconds, found["again"].seconds, found["cut"].seconds)],
        "equal": compare(here, found),
        "seconds": {"here": here.seconds, **{kind: one.seconds for kind, one in found.items()}},
        "latents": here.latents,
        "frames": here.frames,
        "took": took,
    }


def compare(here: Measured, found: dict[Kind, Found]) -> dict[str, bool]:
    """What was the same bits."""
    again, journal, cut = found["again"], found["journal"], found["cut"]
    return {
        **here.equal,
        "another process, cold: latents": again.latents == here.latents,
        "another process, cold: frames": again.frames == here.frames,
        "another process, from the journal: keys and values": all(here.kv) and journal.kv == here.kv,
        "another process, from the journal: goes on as uninterrupted": journal.latents == here.latents[PARKED:],
        "two stages on one device: latents": cut.latents == here.latents[:CUT],
        "no two chunks alike": len(set(here.latents)) == len(here.latents),
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m app.jobs.bench_world", description=__doc__.splitlines()[0])
    add_world_options(parser)
    parser.add_argument("--scratch", type=Path, help="for a random release and a cache; default: a temporary folder")
    parser.add_argument("--out", type=Path, help="JSON with every number")
    parser.add_argument("--profile", type=Path, help="what the device did during one chunk, as text")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """The command's exit status: 0 if all bits agree."""
    options = _parser().parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="bench-world-", dir=options.scratch) as temporary:
        report = bench(options, Path(temporary))
    if options.out:
        options.out.write_text(json.dumps(report, indent=1))
    print(one_line(report["machine"]))
    print(format_rows([Row(**row) for row in report["rows"]]))
    for name, holds in report["equal"].items():
        print(f"{'bit-equal' if holds else 'DIFFERENT'}  {name}")
    return 0 if all(report["equal"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
