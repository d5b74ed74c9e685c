"""The same world in a process of its own: made again, rebuilt from its journal, or made on two stages."""

from __future__ import annotations

import json
import multiprocessing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

import torch

from app.jobs.bench_world.digests import digest, keys_and_values, latents
from app.jobs.bench_world.lengths import AFTER, CUT, PARKED, controls
from app.jobs.bench_world.measurement import warm_up
from app.jobs.bench_world.stopwatch import Stopwatch
from app.jobs.local_world import LocalWorld, LocalWorldModel, WorldSetup
from app.jobs.world_options import start_image
from deployments.lingbot.journal import JournalEntry

Kind = Literal["again", "journal", "cut"]


@dataclass(frozen=True)
class Order:
    """What a process is told.

    again: the whole session cold, keys and values not kept.  journal: the parked session from its journal.  cut: its
    first chunks; the setup says on how many stages.
    """

    kind: Kind
    setup: WorldSetup
    prompt: str
    seed: int
    journal: tuple[bytes, ...]
    out: Path


@dataclass
class Found:
    """What it answers, see `Measured`; digests of the chunks it made."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    latents: list[str] = field(default_factory=list)
    frames: list[str] = field(default_factory=list)
    kv: list[str] = field(default_factory=list)


def ask(order: Order) -> Found:
    """Run the process to its end.  Raises RuntimeError when it ends without an answer."""
    process = multiprocessing.get_context("spawn").Process(target=_answer, args=(order,))
    process.start()
    process.join()
    if process.exitcode != 0:
        raise RuntimeError(f"{order.kind}: its process ended with status {process.exitcode}; see its output above")
    return Found(**json.loads(order.out.read_text()))


def _answer(order: Order) -> None:
    setup = order.setup
    with LocalWorldModel(setup) as model:
        image = start_image(setup.height, setup.width).flip(0)
        world = LocalWorld(model, "bench", b"\1" * 32, image, order.prompt, order.seed)
        out, watch = Found(), Stopwatch(setup.device)
        if order.kind == "journal":
            world.adopt([JournalEntry.from_bytes(entry) for entry in order.journal])
            with watch.time("resume, cold process"):
                world.resume()
            watch.wait()
            out.kv = keys_and_values(model, world, range(PARKED))
            made = range(PARKED, PARKED + AFTER)
        else:
            warm_up(model)
            made = range(PARKED + AFTER if order.kind == "again" else CUT)
        state = model.decoder.start()
        for chunk in made:
            with watch.time("generate"):
                world.generate(controls(chunk, model.stream.chunk))
            if order.kind == "again":
                out.frames.append(digest(torch.from_numpy(world.frames(chunk, state))))
        out.latents = latents(world, made)
        out.seconds = watch.seconds
    order.out.write_text(json.dumps(asdict(out)))
