"""The measurements of one process that has its GPU to itself: a session's life, parked and resumed, cached and found.

Everything is timed on the parts that are served, without Serve: a request is planned, submitted to the gang and waited
for.  A first session warms up and is not counted.
"""

from __future__ import annotations

import io
import threading
import time
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from queue import Queue

import numpy as np
import torch
from torch import Tensor

from app.jobs.bench_world.digests import digest, keys_and_values, latents
from app.jobs.bench_world.lengths import AFTER, COMPARED, OVERLAPPED, PARKED, ROOT, controls
from app.jobs.bench_world.profile import profiled
from app.jobs.bench_world.stopwatch import Stopwatch
from app.jobs.local_world import LocalWorld, LocalWorldModel
from app.jobs.world_options import start_image
from cache_actors.world_cache import WorldCache
from deployments.lingbot.journal import JournalEntry
from deployments.lingbot.stream_config import WARM_LATENTS
from deployments.lingbot.text_encoder import clean_prompt
from deployments.video_file import frames_npz

REPEATS = 3


@dataclass
class Measured:
    """Of one process."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    equal: dict[str, bool] = field(default_factory=dict)
    """What was compared, and whether it was the same bits."""
    latents: list[str] = field(default_factory=list)
    """Digests of the uninterrupted world's chunks; so for the frames."""
    frames: list[str] = field(default_factory=list)
    kv: list[str] = field(default_factory=list)
    """Digests of the last keys and values of the parked session."""
    journal: list[bytes] = field(default_factory=list)
    """The parked session's entries."""


def warm_up(model: LocalWorldModel) -> None:
    """Every kernel once, memory of a whole window and of its restore allocated."""
    setup = model.setup
    world = LocalWorld(model, "warm-up", bytes(32), start_image(setup.height, setup.width), "warm up", 1)
    state = model.decoder.start()
    for chunk in range(2):
        _next(world, model)
        world.frames(chunk, state)
    world.fork("warm-up again", 2).resume()


def measure(model: LocalWorldModel, prompt: str, seed: int, scratch: Path, profile: Path | None) -> Measured:
    """scratch: where a cache's folder may be made.  profile: a file for what the device does during a chunk."""
    out, watch, setup = Measured(), Stopwatch(model.setup.device), model.setup
    warm_up(model)
    image = start_image(setup.height, setup.width).flip(0)
    world = LocalWorld(model, "bench", ROOT, image, prompt, seed)
    frames = _uninterrupted(world, model, watch, out, prompt)
    _parked(world, model, watch, out)
    overlapped = _overlapped(world, model, watch)
    if profile is not None:
        profile.write_text(profiled(lambda: _next(overlapped, model), watch, setup.on_gpu))
    _cached(world, model, frames, watch, out, scratch, prompt, seed)
    out.seconds = watch.seconds
    out.journal = [entry.to_bytes() for entry in world.journal[:PARKED]]
    return out


def _uninterrupted(
    world: LocalWorld, model: LocalWorldModel, watch: Stopwatch, out: Measured, prompt: str
) -> list[np.ndarray]:
    """Open a session and make its chunks one after another; the frames of all."""
    with watch.time("open: prompt"):
        model.text(clean_prompt(prompt))
    with watch.time("open: image"):
        _ = world.world
    state, frames = model.decoder.start(), []
    for chunk in range(PARKED + AFTER):
        with watch.time("open: chunk" if chunk == 0 else "generate"):
            _next(world, model)
        with watch.time("open: frames" if chunk == 0 else "decode"):
            frames.append(world.frames(chunk, state))
    out.latents = latents(world, range(PARKED + AFTER))
    out.frames = [digest(torch.from_numpy(part)) for part in frames]
    out.kv = keys_and_values(model, world, range(PARKED - COMPARED, PARKED))
    return frames


def _parked(world: LocalWorld, model: LocalWorldModel, watch: Stopwatch, out: Measured) -> None:
    """Bring the session back in every way; each must go on as if nothing had been."""
    after = range(PARKED, PARKED + AFTER)
    for name, from_journal in (("resume, kept", False), ("resume, journal", True)):
        for repeat in range(REPEATS):
            twin = world.fork(f"{name} {repeat}", PARKED)
            with watch.time(name):
                twin.resume(from_journal=from_journal)
        for _ in after:
            _next(twin, model)
        out.equal[f"{name}: goes on as uninterrupted"] = latents(twin, after) == out.latents[PARKED:]
    held, position = _last_latents(world, PARKED), PARKED * model.stream.chunk
    with watch.time("decoder warmed"):
        state = model.decoder.warm(held, position)
    out.equal["warmed decoder: frames as uninterrupted"] = (
        digest(torch.from_numpy(world.frames(PARKED, state))) == out.frames[PARKED]
    )


def _overlapped(world: LocalWorld, model: LocalWorldModel, watch: Stopwatch) -> LocalWorld:
    """A chunk is decoded while the next one is made, as for a client that watches a stream; the session."""
    begin = PARKED + AFTER
    twin = world.fork("overlapped", begin)
    twin.resume()
    state = model.decoder.warm(_last_latents(world, begin), begin * model.stream.chunk)
    made: Queue[int] = Queue()

    def make() -> None:
        for chunk in range(begin, begin + OVERLAPPED):
            _next(twin, model)
            made.put(chunk)

    maker = threading.Thread(target=make)
    maker.start()
    arrivals = []
    for _ in range(OVERLAPPED):
        twin.frames(made.get(), state)
        arrivals.append(time.perf_counter())
    maker.join()
    watch.wait()
    watch.seconds["period"] = [later - earlier for earlier, later in pairwise(arrivals[1:])]
    return twin


def _cached(
    world: LocalWorld,
    model: LocalWorldModel,
    frames: list[np.ndarray],
    watch: Stopwatch,
    out: Measured,
    scratch: Path,
    prompt: str,
    seed: int,
) -> None:
    """The parked session's chunks found in a world cache, with stored frames and without."""
    cache = WorldCache(scratch / "cache", 4 << 30)
    setup = model.setup
    material = model.material(start_image(setup.height, setup.width), clean_prompt(prompt), seed)
    root = parent = cache.open_world(material)
    actions = [entry.controls.canonical() for entry in world.journal[:PARKED]]
    for action, entry, part in zip(actions, world.journal, frames, strict=False):
        with watch.time("journal stored"):
            parent = cache.put(root, parent, action, entry.to_bytes())
        cache.put_frames(parent, frames_npz(part, model.stream.fps))
    found = cache.match(root, actions)
    entries, got = [], []
    with watch.time("full hit, frames"):
        for one in cache.match(root, actions):
            with watch.time("frames fetched"):
                got.append(np.load(io.BytesIO(cache.read_frames(one.key)))["frames"])
            entries.append(JournalEntry.from_bytes(cache.read(one.key)))
    out.equal["full hit: stored frames"] = (
        len(found) == PARKED and [digest(torch.from_numpy(p)) for p in got] == (out.frames[:PARKED])
    )
    with watch.time("full hit, decoded"):
        hit = world.fork("hit", 0)
        hit.adopt([JournalEntry.from_bytes(cache.read(one.key)) for one in cache.match(root, actions)])
        state = model.decoder.start()
        again = [hit.frames(chunk, state) for chunk in range(PARKED)]
    out.equal["full hit: decoded frames"] = [digest(torch.from_numpy(p)) for p in again] == out.frames[:PARKED]
    cache.close()


def _next(world: LocalWorld, model: LocalWorldModel) -> None:
    world.generate(controls(len(world.journal), model.stream.chunk))


def _last_latents(world: LocalWorld, chunks: int) -> Tensor:
    """Those that rebuild the decoder's state after so many chunks."""
    return torch.cat([entry.latents for entry in world.journal[:chunks]], dim=2)[:, :, -WARM_LATENTS:]
