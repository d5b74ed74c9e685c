"""Worlds on gangs that are parked, forked, rewound, restarted and found in a cache: each chunk is what its path makes.

The cold oracle makes every path anew on a gang that keeps nothing.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from app.jobs.local_world import LocalWorld, LocalWorldModel, WorldSetup
from app.jobs.world_options import start_image
from cache_actors.keys import Key, node_key
from cache_actors.world_cache import NodeGone, WorldCache
from deployments.lingbot.controls import ChunkControls, Keys, key_frames
from deployments.lingbot.journal import JournalEntry
from tests.world_checkpoints import write_world_checkpoint

HEIGHT, WIDTH, CHUNK, LONGEST = 16, 32, 2, 8
CHUNK_BYTES = 4 * 2 * CHUNK * 2 * 64 * 4  # layers, keys and values, frames, tokens of a frame, width, fp32


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> WorldSetup:
    return WorldSetup(
        folder=write_world_checkpoint(tmp_path_factory.mktemp("world") / "small"),
        support=None,
        dtype="float32",
        vae_dtype="float32",
        on_gpu=False,
        pp=1,
        window=5,
        sink=1,
        chunk=CHUNK,
        height=HEIGHT,
        width=WIDTH,
        max_chunks=LONGEST + 1,
        kv_bytes=6 * CHUNK_BYTES,  # keys and values come and go
        live=2,
    )


def steer(chunk: int, held: str, prompt: str | None = None) -> ChunkControls:
    return ChunkControls(Keys((frozenset(held),) * key_frames(chunk, CHUNK)), prompt)


class ColdOracle:
    """Latents of a path from a gang that keeps nothing, each path computed once."""

    def __init__(self, setup: WorldSetup) -> None:
        self._model = LocalWorldModel(replace(setup, kv_bytes=0))
        self._known: dict[Key, Tensor] = {}
        self._worlds = 0

    def check(self, world: LocalWorld, seed: int) -> None:
        keys = world.keys
        if not all(key in self._known for key in keys):
            self._worlds += 1
            cold = open_world(self._model, f"cold {self._worlds}", seed)
            for key, entry in zip(keys, world.journal, strict=True):
                cold.generate(entry.controls)
                assert torch.equal(self._known.setdefault(key, cold.journal[-1].latents), cold.journal[-1].latents)
        assert all(torch.equal(entry.latents, self._known[key]) for key, entry in zip(keys, world.journal, strict=True))

    def close(self) -> None:
        self._model.close()


def open_world(model: LocalWorldModel, name: str, seed: int) -> LocalWorld:
    return LocalWorld(model, name, bytes([seed]) * 32, start_image(HEIGHT, WIDTH), "a room", seed)


@dataclass
class Players:
    """Sessions of a gang that share a cache of chunks."""

    model: LocalWorldModel
    folder: Path
    draw: random.Random
    count: int
    worlds: list[LocalWorld] = field(default_factory=list)
    seeds: list[int] = field(default_factory=list)
    names: int = 0
    found: int = 0

    def __post_init__(self) -> None:
        self.cache = WorldCache(self.folder, 1 << 26)
        for number in range(self.count):
            self.seeds.append(1 + number % 2)
            self.worlds.append(open_world(self.model, self.name(), self.seeds[-1]))

    def name(self) -> str:
        self.names += 1
        return f"world {self.names}"

    def act(self) -> None:
        i = self.draw.randrange(self.count)
        world, seed = self.worlds[i], self.seeds[i]
        length = len(world.journal)
        match self.draw.choice(["chunk"] * 6 + ["fork", "rewind", "park", "resume", "kill", "lose"]):
            case "chunk" if length < LONGEST:
                self.advance(world, seed)
            case "fork" | "chunk":
                j = self.draw.randrange(self.count)
                self.worlds[j], self.seeds[j] = world.fork(self.name(), self.draw.randint(0, length)), seed
            case "rewind":
                del world.journal[self.draw.randint(max(0, length - 3), length) :]
            case "park":  # another name has no window; what its journal holds is all there is
                self.worlds[i] = world.fork(self.name(), length)
            case "resume":
                world.resume(from_journal=self.draw.random() < 0.5)
            case "kill":
                self.model.replace_gang()
                self.cache.close()
                self.cache = WorldCache(self.folder, 1 << 26)
            case "lose":
                keys = world.keys
                if keys:
                    self.cache.evict(self.draw.choice(keys))

    def advance(self, world: LocalWorld, seed: int) -> None:
        """The next chunk: found, or made and stored."""
        controls = steer(len(world.journal), self.draw.choice(["w", "d"]), self.draw.choice([None] * 5 + ["the rain"]))
        root = bytes([seed]) * 32
        parent = world.keys[-1] if world.journal else root
        key = node_key(parent, controls.canonical())
        try:
            world.adopt([JournalEntry.from_bytes(self.cache.read(key))])
            self.found += 1
        except NodeGone:
            world.generate(controls)
            if parent == root or self.cache.find(parent):
                self.cache.put(root, parent, controls.canonical(), world.journal[-1].to_bytes())


@pytest.fixture
def oracle(setup: WorldSetup) -> Iterator[ColdOracle]:
    oracle = ColdOracle(setup)
    yield oracle
    oracle.close()


@pytest.mark.parametrize(
    ("window", "sink", "count", "operations"),
    [
        (5, 1, 3, 60),
        *(pytest.param(*window, 8, 500, marks=[pytest.mark.slow, pytest.mark.timeout(900)]) for window in
          [(-1, 0), (6, 2), (5, 1)]),
    ],
)  # fmt: skip
def test_random_operations_on_a_gang_s_worlds(
    setup: WorldSetup, window: int, sink: int, count: int, operations: int, tmp_path: Path
) -> None:
    setup = replace(setup, window=window, sink=sink)
    oracle = ColdOracle(setup)
    with LocalWorldModel(setup) as model:
        players = Players(model, tmp_path / "worlds", random.Random(operations), count)
        for _ in range(operations):
            players.act()
            if operations > 100 and players.draw.random() < 0.1:
                i = players.draw.randrange(count)
                oracle.check(players.worlds[i], players.seeds[i])
        for world, seed in zip(players.worlds, players.seeds, strict=True):
            del world.journal[LONGEST:]
            world.generate(steer(len(world.journal), "s"))
            oracle.check(world, seed)
        players.cache.close()
    oracle.close()
    assert players.found > 0


def test_another_seed_shares_no_chunk_and_a_longer_path_shares_all(setup: WorldSetup, oracle: ColdOracle) -> None:
    with LocalWorldModel(setup) as model:
        one, two = open_world(model, "one", 1), open_world(model, "two", 2)
        for chunk in range(2):
            one.generate(steer(chunk, "w"))
            two.generate(steer(chunk, "w"))
        assert not set(one.keys) & set(two.keys)
        assert not any(torch.equal(a.latents, b.latents) for a, b in zip(one.journal, two.journal, strict=True))
        longer = one.fork("longer", 2)
        plan = longer.generate(steer(2, "d"), fast_forward=2)
        assert longer.keys[:2] == one.keys
        assert (plan.fast_forward, [one.op for one in plan.passes]) == (2, ["restore", *["denoise"] * 4, "clean"])
        oracle.check(longer, 1)
