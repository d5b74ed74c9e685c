"""``python -m app.jobs.bench_world``: how fast worlds are made, found, parked and brought back, and that bits agree.

    python -m app.jobs.bench_world --random 1.3b --scratch scratch/ --out bench-world.json
    python -m app.jobs.bench_world --random small --device cpu --scratch scratch/ --out bench-world.json

One process measures.  Then two more, side by side, rebuild the world from its journal and make it again, and make it on
two stages that share the device.  With `--random` the weights have a real model's shape and are noise: times are real,
pictures are not.  Exit status 1 where bits differ; a missed aim is shown, and fails nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from app.jobs.bench.machine import describe_machine, one_line
from app.jobs.bench_world.lengths import AFTER, COMPARED, CUT, PARKED, TOTAL
from app.jobs.bench_world.measurement import Measured, measure
from app.jobs.bench_world.other_process import Found, Kind, Order, ask
from app.jobs.bench_world.table import format_rows, rows
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
    """Everything, as plain data; written to `options.out` as soon as a part of it is known."""
    report: dict[str, Any] = {"machine": describe_machine(), "random": options.random, "took": {}, "equal": {}}

    def lap(name: str, began: float) -> float:
        report["took"][name] = round(time.perf_counter() - began, 2)
        print(f"{name}: {report['took'][name]:.1f} s", flush=True)
        if options.out:
            options.out.write_text(json.dumps(report, indent=1))
        return time.perf_counter()

    print(one_line(report["machine"]), flush=True)
    began = time.perf_counter()
    setup = setup_of(options, scratch, pp=1, max_chunks=TOTAL, kv_bytes=0)
    report |= {"checkpoint": str(setup.folder), "dtype": setup.dtype, "size": f"{setup.height}x{setup.width}"}
    began = lap("checkpoint", began)
    with LocalWorldModel(replace(setup, kv_bytes=kv_bytes_of(setup, PARKED + AFTER))) as model:
        began = lap("load", began)
        here = measure(model, options.prompt, options.seed, scratch, options.profile)
        report["device_bytes_peak"] = torch.cuda.max_memory_allocated() if setup.on_gpu else 0
    report |= {"seconds": here.seconds, "latents": here.latents, "frames": here.frames, "equal": here.equal}
    report["rows"] = [asdict(row) for row in rows(here.seconds)]
    print(format_rows(rows(here.seconds)))
    began = lap("measurement", began)
    setups: dict[Kind, WorldSetup] = {
        "again": replace(setup, kv_bytes=kv_bytes_of(setup, COMPARED)),
        "cut": replace(setup, pp=2),
    }
    journal = tuple(here.journal)
    found = ask(
        [
            Order(kind, its, options.prompt, options.seed, journal, scratch / f"{kind}.json")
            for kind, its in setups.items()
        ]
    )
    report["equal"] = compare(here, found)
    lap("other processes", began)
    return report


def compare(here: Measured, found: Mapping[Kind, Found]) -> dict[str, bool]:
    """What was the same bits."""
    again, cut = found["again"], found["cut"]
    return {
        **here.equal,
        "another process, cold: latents": again.latents == here.latents,
        "another process, cold: frames": again.frames == here.frames,
        "another process, from the journal: keys and values": all(here.kv) and again.kv == here.kv,
        "another process, from the journal: goes on as uninterrupted": again.after == here.latents[PARKED:],
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
    for name, holds in report["equal"].items():
        print(f"{'bit-equal' if holds else 'DIFFERENT'}  {name}")
    return 0 if all(report["equal"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
