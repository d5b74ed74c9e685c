"""One run of the proof, in a process of its own: it shares nothing with the others but the cache's actor."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import ray

from app.jobs.local_world import LocalWorld, LocalWorldModel, WorldSetup
from app.jobs.prove_world.run_result import RunResult
from app.jobs.world_options import start_image
from cache_actors.keys import Key, path_keys
from cache_actors.world_cache import NodeGone
from cache_actors.world_cache_actor import NAMESPACE, WorldCacheClient
from deployments.lingbot.controls import ChunkControls
from deployments.lingbot.journal import JournalEntry
from deployments.lingbot.text_encoder import clean_prompt

logger = logging.getLogger("worldstage.prove_world")


@dataclass(frozen=True)
class Run:
    """What a process is told."""

    tag: str
    setup: WorldSetup
    path: tuple[ChunkControls, ...]
    prompt: str
    seed: int
    actor: str
    """Name of the cache's actor."""
    ray_address: str
    out: Path
    """Where its `RunResult` goes, as JSON."""


def play(run: Run) -> None:
    """The process's main function."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    ray.init(address=run.ray_address, namespace=NAMESPACE, log_to_driver=False)
    began = time.perf_counter()
    with LocalWorldModel(run.setup) as model:
        load_s = time.perf_counter() - began
        result = asyncio.run(_Player(run, model, load_s).play())
    run.out.write_text(result.model_dump_json())
    ray.shutdown()


@dataclass
class _Player:
    """Follows the path: over what the cache knows, then chunk by chunk."""

    run: Run
    model: LocalWorldModel
    load_s: float
    hashes: list[str] = field(default_factory=list)
    flush_s: float = 0.0

    async def play(self) -> RunResult:
        run, model = self.run, self.model
        cache = WorldCacheClient(ray.get_actor(run.actor, NAMESPACE))
        image = start_image(run.setup.height, run.setup.width)
        material = model.material(image, clean_prompt(run.prompt), run.seed)
        began = time.perf_counter()
        root = await cache.open_world(material)
        world = LocalWorld(model, f"proof-{run.tag}", root, image, run.prompt, run.seed)
        world.adopt(await self._known(cache, root))
        known = len(world.journal)
        logger.info("%s: world cache: fast-forward %d of %d chunks", run.tag, known, len(run.path))
        state = model.decoder.start()
        for chunk in range(known):
            self._hash(world.frames(chunk, state))
        times: list[float] = []
        passes: Counter[str] = Counter()
        for chunk, controls in enumerate(run.path[known:], start=known):
            chunk_began = time.perf_counter()
            plan = world.generate(controls, fast_forward=known if chunk == known else 0)
            passes.update(one.op for one in plan.passes)
            frames = world.frames(chunk, state)
            times.append(time.perf_counter() - chunk_began)
            self._hash(frames)
            await self._store(cache, root, world)
        return RunResult(
            tag=run.tag,
            fast_forward_k=known,
            n_chunks=len(world.journal),
            n_frames=len(self.hashes),
            wall_s=time.perf_counter() - began,
            load_s=self.load_s,
            flush_s=self.flush_s,
            chunk_times_s=tuple(times),
            passes=dict(passes),
            frame_sha256=tuple(self.hashes),
            pid=os.getpid(),
        )

    async def _known(self, cache: WorldCacheClient, root: Key) -> list[JournalEntry]:
        """The longest prefix of the path that the cache gives back whole."""
        entries: list[JournalEntry] = []
        for found in await cache.match(root, [controls.canonical() for controls in self.run.path]):
            try:
                entries.append(JournalEntry.from_bytes(await cache.read(found.key)))
            except NodeGone as gone:
                logger.warning("%s: chunk %d is made again: %s", self.run.tag, found.depth - 1, gone)
                break
        return entries

    async def _store(self, cache: WorldCacheClient, root: Key, world: LocalWorld) -> None:
        began, entry = time.perf_counter(), world.journal[-1]
        parent = path_keys(root, [e.controls.canonical() for e in world.journal[:-1]])[-1:] or [root]
        await cache.put(root, parent[0], entry.controls.canonical(), entry.to_bytes())
        self.flush_s += time.perf_counter() - began

    def _hash(self, frames: np.ndarray) -> None:
        self.hashes += [hashlib.sha256(frame.tobytes()).hexdigest() for frame in frames]
