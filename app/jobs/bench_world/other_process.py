"""The same world in processes of their own: rebuilt from its journal, made again, and made on two stages."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

import torch

from app.jobs.bench_world.digests import digest, keys_and_values, latents
from app.jobs.bench_world.lengths import AFTER, COMPARED, CUT, PARKED, ROOT, controls
from app.jobs.local_world import LocalWorld, LocalWorldModel, WorldSetup
from app.jobs.world_options import start_image
from deployments.lingbot.journal import JournalEntry

Kind = Literal["again", "cut"]


@dataclass(frozen=True)
class Order:
    """What a process is told.

    again: bring the parked session back from its journal and go on, then make the whole world anew.  cut: make its
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
    """What it answers: digests."""

    latents: list[str] = field(default_factory=list)
    """Of the chunks made anew; so for their frames."""
    frames: list[str] = field(default_factory=list)
    after: list[str] = field(default_factory=list)
    """Of the latents that the session from the journal went on with."""
    kv: list[str] = field(default_factory=list)
    """Of its last replayed keys and values."""


def ask(orders: Sequence[Order]) -> dict[Kind, Found]:
    """Run the processes side by side to their ends.  Raises RuntimeError when one ends without an answer."""
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_answer, args=(order,)) for order in orders]
    for process in processes:
        process.start()
    found: dict[Kind, Found] = {}
    for order, process in zip(orders, processes, strict=True):
        process.join()
        if process.exitcode != 0:
            raise RuntimeError(f"{order.kind}: its process ended with status {process.exitcode}; see its output above")
        found[order.kind] = Found(**json.loads(order.out.read_text()))
    return found


def _answer(order: Order) -> None:
    with LocalWorldModel(order.setup) as model:
        found = _again(order, model) if order.kind == "again" else _cut(order, model)
    order.out.write_text(json.dumps(asdict(found)))


def _again(order: Order, model: LocalWorldModel) -> Found:
    found, replayed = Found(), _world(order, model, "replayed")
    replayed.adopt([JournalEntry.from_bytes(entry) for entry in order.journal])
    replayed.resume(from_journal=True)
    if order.setup.on_gpu:
        torch.cuda.synchronize()
    found.kv = keys_and_values(model, replayed, range(PARKED - COMPARED, PARKED))
    for chunk in range(PARKED, PARKED + AFTER):
        replayed.generate(controls(chunk, model.stream.chunk))
    found.after = latents(replayed, range(PARKED, PARKED + AFTER))
    anew, state = _world(order, model, "anew"), model.decoder.start()
    for chunk in range(PARKED + AFTER):
        anew.generate(controls(chunk, model.stream.chunk))
        found.frames.append(digest(torch.from_numpy(anew.frames(chunk, state))))
    found.latents = latents(anew, range(PARKED + AFTER))
    return found


def _cut(order: Order, model: LocalWorldModel) -> Found:
    world = _world(order, model, "cut")
    for chunk in range(CUT):
        world.generate(controls(chunk, model.stream.chunk))
    return Found(latents=latents(world, range(CUT)))


def _world(order: Order, model: LocalWorldModel, name: str) -> LocalWorld:
    setup = order.setup
    image = start_image(setup.height, setup.width).flip(0)
    return LocalWorld(model, name, ROOT, image, order.prompt, order.seed)
