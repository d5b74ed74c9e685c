"""The driver on the real replicas of one rank, in this process: every way to a chunk gives the session core's bits."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from app.api.errors import NotReady
from app.api.world_errors import ChunkFailed, UnknownChunk, UnknownWorld, WorldMovedOn, WorldsFull
from app.config import Jobs, WorldModel, Worlds
from app.worlds import served_model
from app.worlds.chunk_sharing import ChunkSharing
from app.worlds.journal_files import JournalFiles
from app.worlds.world_driver import WorldDriver
from app.worlds.world_request import ChunkRequest, Hold, WorldParams, chunk_controls
from cache_actors.world_cache import WorldCache
from cache_actors.world_cache_actor import WorldCacheAway
from deployments.gang.gang_lost import GangLost
from deployments.lingbot.camera_path import CameraPolicy
from deployments.lingbot.checkpoint import load_stage, open_world_checkpoint
from deployments.lingbot.fast_forward import ChunkCosts
from deployments.lingbot.kv_store import KVStore
from deployments.lingbot.session import World, WorldEngine, WorldSession
from deployments.lingbot.text_encoder import WorldTextEncoder
from deployments.storage import Storage
from tests.world_checkpoints import write_world_checkpoint
from tests.world_services import STREAM, LocalModel, local_model

IMAGE = np.random.default_rng(0).integers(0, 256, (16, 32, 3), dtype=np.uint8)
PARAMS = WorldParams(model="small", prompt="a red circle", seed=5, width=32, height=16, shared=True)


@pytest.fixture(scope="module")
def world_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return write_world_checkpoint(tmp_path_factory.mktemp("world"))


@dataclass
class Setup:
    """Everything that outlives a driver."""

    folder: Path
    model: LocalModel
    storage: Storage
    sharing: ChunkSharing | None = None
    worlds: dict[str, Any] = field(default_factory=dict)

    @asynccontextmanager
    async def driver(self) -> AsyncIterator[WorldDriver]:
        served = WorldModel(name="small", checkpoint="unused")
        jobs = Jobs(database_url=f"sqlite:///{self.folder}/jobs.db", storage_url=str(self.folder / "results"))
        driver = WorldDriver([self.model.services], Worlds(models=(served,), **self.worlds), jobs, self.sharing)
        async with asyncio.timeout(60):
            while not (await driver.readiness())["small"]["ready"]:
                await asyncio.sleep(0.01)
        yield driver

    def latents(self, world: str, keys: list[str]) -> list[Tensor]:
        return [JournalFiles(self.storage).latents(world, key) for key in keys]


@pytest.fixture
def setup(world_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Setup:
    monkeypatch.setattr(served_model, "RETRY_PAUSE_S", 0.01)
    storage = Storage(str(tmp_path / "results"))
    return Setup(tmp_path, local_model(world_folder, storage, monkeypatch), storage)


def request(keys: str, chunks: int = 1, **fields: Any) -> ChunkRequest:
    return ChunkRequest(camera=Hold(keys=keys, chunks=chunks), **fields)


def play(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(test())


async def walk(driver: WorldDriver, world: str, path: str, start: int = 0) -> list[str]:
    """A letter a chunk, R changes the prompt; the keys of the world's path afterwards."""
    for n, letter in enumerate(path, start=start):
        prompt = "a blue square" if letter == "R" else None
        await driver.grow(world, request(letter.lower().replace("r", "w"), after=n, prompt=prompt), True)
    return [view.chunk.key for view in await driver.chunks(world)]


def core(setup: Setup, checkpoint_folder: Path, world: str, path: str) -> list[Tensor]:
    """The same path in one session core, uninterrupted."""
    checkpoint = open_world_checkpoint(checkpoint_folder)
    stage = load_stage(checkpoint, range(4), dtype=torch.float32, device=torch.device("cpu"))
    text = WorldTextEncoder(checkpoint_folder, 16, torch.float32, torch.device("cpu"))
    costs = ChunkCosts(generate=5, clean=1, restore=1, decode=1, frames=1)
    engine = WorldEngine((stage,), (KVStore(0),), STREAM, CameraPolicy(), costs, text.encode)
    condition = JournalFiles(setup.storage).condition(world)
    session = WorldSession(engine, World(b"r" * 32, condition, "a red circle", 5, 16, 32))
    for n, letter in enumerate(path):
        prompt = "a blue square" if letter == "R" else None
        (controls,) = chunk_controls(request(letter.lower().replace("r", "w"), prompt=prompt), n, STREAM.chunk)
        session.generate(controls)
    return [entry.latents for entry in session.journal]


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def frames_of(setup: Setup, file: str) -> np.ndarray:
    found: np.ndarray = np.load(io.BytesIO(setup.storage.read_bytes(file)))["frames"]
    return found


def test_a_path_equals_the_session_core(setup: Setup, world_folder: Path):
    async def test() -> None:
        async with setup.driver() as driver:
            world = (await driver.open(PARAMS, IMAGE)).world.id
            keys = await walk(driver, world, "wRds")
            assert_same(setup.latents(world, keys), core(setup, world_folder, world, "wRds"))
            view = await driver.get(world)
            assert (view.chunks, view.frames, view.parked, view.busy) == (4, 5 + 3 * 8, False, False)

    play(test)


def test_parked_forked_and_rewound_worlds_equal_the_core(setup: Setup, world_folder: Path):
    async def test() -> None:
        async with setup.driver() as driver:
            world = (await driver.open(PARAMS, IMAGE)).world.id
            await walk(driver, world, "wRd")
            assert (await driver.park(world)).parked
            fork = (await driver.fork(world, 2)).world.id
            forked = await walk(driver, fork, "al", start=2)
            keys = await walk(driver, world, "s", start=3)
            assert_same(setup.latents(world, keys), core(setup, world_folder, world, "wRds"))
            assert_same(setup.latents(fork, forked), core(setup, world_folder, world, "wRal"))
            dropped = (await driver.chunk(world, 3)).file
            await driver.rewind(world, 1)
            assert not setup.storage.exists(dropped)
            with pytest.raises(UnknownChunk):
                await driver.chunk(world, 1)
            keys = await walk(driver, world, "dd", start=1)
            assert_same(setup.latents(world, keys), core(setup, world_folder, world, "wdd"))

    play(test)


def test_a_gang_that_breaks_is_replaced_by_a_replay(setup: Setup, world_folder: Path):
    async def test() -> None:
        async with setup.driver() as driver:
            world = (await driver.open(PARAMS, IMAGE)).world.id
            await walk(driver, world, "wR")
            setup.model.gang.failures.append(GangLost("a rank was killed"))
            keys = await walk(driver, world, "ds", start=2)
            assert (await driver.chunk(world, 2)).chunk.replayed == 2
            assert_same(setup.latents(world, keys), core(setup, world_folder, world, "wRds"))

    play(test)


def test_what_a_gang_keeps_is_not_sent_again(setup: Setup):
    """The condition and the embeddings of a prompt; a parked world's gang keeps neither."""

    async def test() -> None:
        async with setup.driver() as driver:
            world = (await driver.open(PARAMS, IMAGE)).world.id
            sent = setup.model.gang.sent
            sent.clear()
            await walk(driver, world, "wwRd")
            assert sent == [["condition", "text.0"], [], ["text.1"], []]
            await driver.rewind(world, 1)
            await driver.park(world)
            sent.clear()
            setup.model.gang.restart()
            await walk(driver, world, "s", start=1)
            assert sent == [["condition", "latents.0", "text.0"]]

    play(test)


def test_a_chunk_that_breaks_gangs_fails_and_its_world_stays(setup: Setup, world_folder: Path):
    async def test() -> None:
        async with setup.driver() as driver:
            world = (await driver.open(PARAMS, IMAGE)).world.id
            await walk(driver, world, "w")
            cases: list[tuple[list[Exception], str]] = [
                ([GangLost("killed")] * 3, "in a row"),
                ([RuntimeError("CUDA error")], "CUDA error"),
            ]
            for errors, words in cases:
                setup.model.gang.failures += errors
                with pytest.raises(ChunkFailed, match=words):
                    await driver.grow(world, request("d"), False)
                assert (await driver.get(world)).chunks == 1
            keys = await walk(driver, world, "s", start=1)
            assert_same(setup.latents(world, keys), core(setup, world_folder, world, "ws"))

    play(test)


def test_a_lost_decoder_gives_the_same_frames(setup: Setup):
    async def test() -> None:
        async with setup.driver() as driver:
            calm, rough = [(await driver.open(PARAMS, IMAGE)).world.id for _ in range(2)]
            await walk(driver, calm, "wds")
            await walk(driver, rough, "wd")
            setup.model.vae.restart()
            setup.model.vae.failures.append(GangLost("killed"))
            await walk(driver, rough, "s", start=2)
            for index in range(3):
                files = [(await driver.frames(world, index)).file for world in (calm, rough)]
                assert np.array_equal(*(frames_of(setup, file) for file in files))
            setup.storage.delete((await driver.chunk(rough, 1)).file)
            view = await driver.frames(rough, 1)  # decoded again, out of turn
            assert np.array_equal(frames_of(setup, view.file), frames_of(setup, (await driver.chunk(calm, 1)).file))
            images = await driver.images(rough, 2, "png")
            assert len(images) == 8

    play(test)


def test_another_driver_goes_on_where_the_first_one_died(setup: Setup, world_folder: Path):
    async def test() -> None:
        async with setup.driver() as first:
            world = (await first.open(PARAMS, IMAGE)).world.id
            made = await first.grow(world, request("w", 2), True)
            async with setup.driver() as second:
                again = await second.grow(world, request("w", 2, after=0), True)  # its answer was lost
                assert [view.chunk for view in again] == [view.chunk for view in made]
                keys = await walk(second, world, "d", start=2)
                assert_same(setup.latents(world, keys), core(setup, world_folder, world, "wwd"))
                with pytest.raises(NotReady, match="another driver"):  # not dead after all
                    await first.grow(world, request("s"), False)
                assert [view.chunk.key for view in await first.chunks(world)] == keys

    play(test)


def test_repeated_requests_and_those_that_do_not_fit(setup: Setup):
    async def test() -> None:
        async with setup.driver() as driver:
            world = (await driver.open(PARAMS, IMAGE)).world.id
            made = await driver.grow(world, request("w", 3), False)
            assert await driver.grow(world, request("w", 2, after=1), False) == made[1:]
            with pytest.raises(WorldMovedOn, match="other controls"):
                await driver.grow(world, request("d", after=1), False)
            with pytest.raises(WorldMovedOn, match="the world has 3 chunks"):
                await driver.grow(world, request("d", after=4), False)
            with pytest.raises(WorldMovedOn, match="max_chunks = 8"):
                await driver.grow(world, request("d", 6), False)
            with pytest.raises(WorldMovedOn):
                await driver.rewind(world, 4)
            with pytest.raises(UnknownWorld):
                await driver.grow("world_x", request("d"), False)
            assert (await driver.get(world)).chunks == 3

    play(test)


def test_too_many_requests_and_too_many_worlds_are_refused(setup: Setup):
    """Two at work, one waits, the fourth is told when to come back."""
    setup.worlds = {"max_waiting": 1, "max_worlds": 4}

    async def test() -> None:
        async with setup.driver() as driver:
            worlds = [(await driver.open(PARAMS, IMAGE)).world.id for _ in range(4)]
            with pytest.raises(WorldsFull, match="max_worlds"):
                await driver.open(PARAMS, IMAGE)
            setup.model.gang.hold = asyncio.Event()
            waiting = [asyncio.ensure_future(driver.grow(world, request("w"), False)) for world in worlds[:3]]
            while not (await driver.get(worlds[2])).busy:
                await asyncio.sleep(0.01)
            with pytest.raises(WorldsFull, match="max_waiting") as refused:
                await driver.grow(worlds[3], request("w"), False)
            assert refused.value.retry_after_s is not None
            setup.model.gang.hold.set()
            await asyncio.gather(*waiting)
            await driver.grow(worlds[3], request("w"), False)
            await driver.delete(worlds[3])
            await driver.open(PARAMS, IMAGE)

    play(test)


def test_a_world_deleted_meanwhile_is_unknown_to_who_waits_for_it(setup: Setup):
    async def test() -> None:
        async with setup.driver() as driver:
            world = (await driver.open(PARAMS, IMAGE)).world.id
            setup.model.gang.hold = asyncio.Event()
            making = asyncio.ensure_future(driver.grow(world, request("w"), False))
            while not (await driver.get(world)).busy:
                await asyncio.sleep(0.01)
            deleting = asyncio.ensure_future(driver.delete(world))
            await asyncio.sleep(0.05)
            late = asyncio.ensure_future(driver.grow(world, request("w"), False))
            await asyncio.sleep(0.05)
            setup.model.gang.hold.set()
            assert len(await making) == 1
            await deleting
            with pytest.raises(UnknownWorld):
                await late
            assert setup.storage.list(world) == ()

    play(test)


class LocalCache:
    """`WorldCacheClient` on a cache in this process; `away` makes every call fail as a lost actor does."""

    def __init__(self, cache: WorldCache) -> None:
        self._cache, self.away = cache, False

    def __getattr__(self, name: str) -> Callable[..., Coroutine[Any, Any, Any]]:
        async def call(*arguments: Any) -> Any:
            if self.away:
                raise WorldCacheAway("killed")
            return getattr(self._cache, name)(*arguments)

        return call


def test_worlds_that_begin_alike_share_chunks_and_frames(setup: Setup, world_folder: Path):
    cache = WorldCache(setup.folder / "cache", 1 << 26)
    client = LocalCache(cache)
    setup.sharing = ChunkSharing(client)  # type: ignore[arg-type]

    async def test() -> None:
        async with setup.driver() as driver:
            first = (await driver.open(PARAMS, IMAGE)).world.id
            client.away = True  # what is made meanwhile is shared with the next chunk
            await walk(driver, first, "wR")
            client.away = False
            keys = await walk(driver, first, "d", start=2)
            while cache.stats()["chunks"] < 3 or not all(f.has_frames for k in keys[2:] if (f := found(k))):
                await asyncio.sleep(0.01)
            before = setup.model.gang.calls.count("generate")
            second = (await driver.open(PARAMS, IMAGE)).world.id
            await walk(driver, second, "wRd")
            assert setup.model.gang.calls.count("generate") == before
            receipts = [(v.chunk.source, v.chunk.fast_forward_k) for v in await driver.chunks(second)]
            assert receipts == [("cache", 1), ("cache", 2), ("cache", 3)]
            for index in range(3):
                files = [(await driver.frames(world, index)).file for world in (first, second)]
                assert np.array_equal(*(frames_of(setup, file) for file in files))
            forked = await walk(driver, second, "s", start=3)
            assert_same(setup.latents(second, forked), core(setup, world_folder, second, "wRds"))
            alone = (await driver.open(PARAMS.model_copy(update={"shared": False}), IMAGE)).world.id
            await walk(driver, alone, "w")
            assert (await driver.chunk(alone, 0)).chunk.source == "generated"
            client.away = True
            third = (await driver.open(PARAMS, IMAGE)).world.id
            assert await walk(driver, third, "wRds") == forked

    def found(key: str) -> Any:
        return cache.find(bytes.fromhex(key))

    play(test)
    cache.close()
