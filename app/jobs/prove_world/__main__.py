"""``python -m app.jobs.prove_world``: that worlds sharing a prefix share its chunks, and bit for bit.

    python -m app.jobs.prove_world --random small --frame-num 61 --prefix-chunks 2 --out-dir proof/
    python -m app.jobs.prove_world --random small --frame-num 61 --prefix-chunks 2 --pp 4 --window 5 --sink 1 ...
    python -m app.jobs.prove_world --random 1.3b --frame-num 45 --prefix-chunks 1 --out-dir proof-1.3b/

    A   a trajectory, with an empty cache                  B   the same again
    C   a fork: the prefix of A, then other controls       D   the same fork, with an empty cache of its own

Each run is a process of its own; A, B and C share the cache's actor and nothing else.  B must equal A and C must
equal D in the bytes of every frame.  `out-dir` gets `manifest.json` and the caches' folders.  Exit status 0 only if all
holds.

The actors run on the Ray that RAY_ADDRESS names (so in a Ray job on its cluster), else on one started for the proof.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import secrets
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray

from app.jobs.bench.machine import describe_machine
from app.jobs.prove_world.one_run import Run, play
from app.jobs.prove_world.run_result import RunResult, checks, guards
from app.jobs.prove_world.trajectories import trajectory
from app.jobs.world_options import add_world_options, setup_of
from cache_actors.world_cache_actor import NAMESPACE, get_or_create
from cache_actors.world_config import WorldCacheConfig
from deployments.lingbot.checkpoint import open_world_checkpoint
from deployments.lingbot.stream_config import STREAMS, pixel_frames, whole_chunks

BUDGET_GIB = 1.0
"""Of each cache: 81 frames at 464x832 are 10 MiB of journal."""


class RunEnded(RuntimeError):
    """A run's process ended without a result."""


def prove(options: argparse.Namespace) -> dict[str, Any]:
    """All four runs; the manifest."""
    folder: Path = options.out_dir
    folder.mkdir(parents=True, exist_ok=True)
    chunks = 1 + options.frame_num // 4
    setup = setup_of(options, folder, pp=options.pp, max_chunks=chunks, kv_bytes=0)
    stream = STREAMS[open_world_checkpoint(setup.folder, setup.support).layout]
    chunk = setup.chunk or stream.chunk
    main, fork = (
        trajectory(options.frame_num, options.prefix_chunks, chunk, forked=forked) for forked in (False, True)
    )
    setup = replace(setup, max_chunks=whole_chunks(options.frame_num, chunk))
    runs: dict[str, RunResult] = {}
    with _caches(folder) as (address, shared, fresh):
        for tag, path, actor in (("A", main, shared), ("B", main, shared), ("C", fork, shared), ("D", fork, fresh)):
            out = folder / f"run-{tag}.json"
            run = Run(tag, setup, path, options.prompt, options.seed, actor, address, out)
            runs[tag] = _in_a_process(run)
            print(_line(runs[tag]), flush=True)
    prefix_frames = sum(pixel_frames(index, chunk) for index in range(options.prefix_chunks))
    proved = checks(runs, options.prefix_chunks)
    guarded = guards(runs, prefix_frames)
    return {
        "all_pass": all(proved.values()) and all(guarded.values()),
        "checks": proved,
        "guards": guarded,
        "frame_num": options.frame_num,
        "prefix_chunks": options.prefix_chunks,
        "seed": options.seed,
        "prompt": options.prompt,
        "store": str(folder / "shared"),
        "pipeline": {
            "local_attn_size": stream.window if setup.window is None else setup.window,
            "sink_size": stream.sink if setup.sink is None else setup.sink,
            "chunk": chunk,
            "pp": setup.pp,
            "size": f"{setup.height}x{setup.width}",
            "dtype": setup.dtype,
            "vae_dtype": setup.vae_dtype,
            "checkpoint": str(setup.folder),
            "random_weights": options.random is not None,
        },
        "device": options.device,
        "machine": describe_machine(),
        "results": {tag: run.model_dump() for tag, run in runs.items()},
    }


@contextmanager
def _caches(folder: Path) -> Iterator[tuple[str, str, str]]:
    """Ray's address and the names of two empty caches, which are gone afterwards; their folders stay."""
    address = os.environ.get("RAY_ADDRESS")
    if address:
        ray.init(address=address, namespace=NAMESPACE, log_to_driver=False)
    else:
        ray.init(address="local", num_cpus=1, include_dashboard=False, namespace=NAMESPACE, log_to_driver=False)
    name = f"world-proof-{secrets.token_hex(4)}"
    actors = []
    try:
        for part in ("shared", "fresh"):
            root = folder.resolve() / f"{part}-{name[-8:]}"
            actors.append(get_or_create(WorldCacheConfig(root=str(root), budget_gib=BUDGET_GIB), f"{name}-{part}"))
        yield ray.get_runtime_context().gcs_address, f"{name}-shared", f"{name}-fresh"
    finally:
        for actor in actors:
            ray.kill(actor, no_restart=True)
        ray.shutdown()


def _in_a_process(run: Run) -> RunResult:
    process = multiprocessing.get_context("spawn").Process(target=play, args=(run,))
    process.start()
    process.join()
    if process.exitcode != 0:
        raise RunEnded(f"run {run.tag}: its process ended with status {process.exitcode}; its output above says why")
    return RunResult.model_validate_json(run.out.read_text())


def _line(run: RunResult) -> str:
    each = f"{max(run.chunk_times_s):.2f} s a chunk at most" if run.chunk_times_s else "nothing made"
    return f"{run.tag}: {run.fast_forward_k} of {run.n_chunks} chunks from the cache, {run.wall_s:.2f} s, {each}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m app.jobs.prove_world", description=__doc__.splitlines()[0])
    parser.add_argument("--frame-num", type=int, required=True, help="video frames, 4n + 1")
    parser.add_argument("--prefix-chunks", type=int, required=True, help="chunks before the fork")
    parser.add_argument("--out-dir", type=Path, required=True)
    parser.add_argument("--pp", type=int, default=1, help="pipeline stages")
    add_world_options(parser)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """The command's exit status: 0 if everything holds, 1 if not, 2 for wrong options."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        manifest = prove(options)
    except ValueError as error:
        parser.error(str(error))
    path = options.out_dir / "manifest.json"
    path.write_text(json.dumps(manifest, indent=1))
    for group in ("checks", "guards"):
        for name, holds in manifest[group].items():
            print(f"  {name}: {'holds' if holds else 'FAILS'}")
    print(f"all_pass: {str(manifest['all_pass']).lower()}  {path}")
    return 0 if manifest["all_pass"] else 1


if __name__ == "__main__":
    sys.exit(main())
