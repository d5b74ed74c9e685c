"""Sessions: whatever happens between chunks, every chunk has the bits of an uninterrupted world with its controls."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor

from cache_actors.keys import Key, path_keys
from deployments.lingbot.camera_path import CameraPolicy
from deployments.lingbot.checkpoint import WorldCheckpoint, load_stage
from deployments.lingbot.controls import ChunkControls, Keys, Poses, key_frames
from deployments.lingbot.fast_forward import ChunkCosts
from deployments.lingbot.journal import JournalEntry
from deployments.lingbot.kv_store import KVStore
from deployments.lingbot.sampler_tables import V1_FAST
from deployments.lingbot.session import Receipt, World, WorldEngine, WorldSession
from deployments.lingbot.stage_session import session_bytes
from deployments.lingbot.stream_config import StreamConfig

HEIGHT, WIDTH, CHUNK = 32, 48, 2
WINDOWS = [(-1, 0), (6, 2), (5, 1)]
RESTORES = ChunkCosts(generate=5, clean=1, restore=0.1, decode=1, frames=0.1)
REPLAYS = ChunkCosts(generate=5, clean=1, restore=100, decode=1, frames=0.1)
PLENTY = 1 << 30


def text_of(prompt: str) -> Tensor:
    return torch.randn(1 + len(prompt) % 7, 48, generator=torch.Generator().manual_seed(len(prompt)))


Make = Callable[..., WorldEngine]


@pytest.fixture(scope="module")
def make(checkpoint: WorldCheckpoint) -> Make:
    def engine(
        window: tuple[int, int] = (5, 1),
        cut: Iterable[int] = (0, 4),
        costs: ChunkCosts = RESTORES,
        budget: int = PLENTY,
    ) -> WorldEngine:
        edges = list(cut)
        stages = tuple(
            load_stage(checkpoint, range(a, b), dtype=torch.float32, device=torch.device("cpu"))
            for a, b in itertools.pairwise(edges)
        )
        stores = tuple(KVStore(budget) for _ in stages)
        stream = StreamConfig(CHUNK, *window, V1_FAST)
        return WorldEngine(stages, stores, stream, CameraPolicy(), costs, text_of)

    return engine


def world(seed: int = 3, prompt: str = "a red circle") -> World:
    condition = torch.randn(20, 31, HEIGHT // 8, WIDTH // 8, generator=torch.Generator().manual_seed(seed))
    return World(bytes([seed]) * 32, condition, prompt, seed, HEIGHT, WIDTH)


def keys(chunk: int, held: str, prompt: str | None = None) -> ChunkControls:
    return ChunkControls(Keys((frozenset(held),) * key_frames(chunk, CHUNK)), prompt)


def run(session: WorldSession, path: Iterable[str]) -> list[Tensor]:
    for held in path:
        session.generate(keys(len(session.journal), held))
    return latents(session)


def latents(session: WorldSession) -> list[Tensor]:
    return [entry.latents for entry in session.journal]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("cut", [(0, 2, 4), (0, 1, 3, 4), (0, 1, 2, 3, 4)])
def test_any_number_of_stages_makes_the_same_world(make: Make, cut: tuple[int, ...]) -> None:
    assert same(run(WorldSession(make(cut=cut), world()), "wdai"), run(WorldSession(make(), world()), "wdai"))


@pytest.mark.parametrize("costs", [RESTORES, REPLAYS], ids=["restored", "replayed"])
@pytest.mark.parametrize("window", WINDOWS)
def test_a_parked_session_goes_on_exactly(make: Make, window: tuple[int, int], costs: ChunkCosts) -> None:
    whole = run(WorldSession(make(window), world()), "wwdlai")
    for park_after in (1, 3, 5):
        engine = make(window, costs=costs)
        session = WorldSession(engine, world())
        run(session, "wwdlai"[:park_after])
        session.park()
        assert session.live_bytes == 0
        receipt = session.generate(keys(park_after, "wwdlai"[park_after]))
        if costs is RESTORES:
            assert receipt == Receipt(park_after, park_after, 0)
        else:
            assert receipt == Receipt(park_after, None, park_after)
        assert same(run(session, "wwdlai"[park_after + 1 :]), whole)


def test_another_process_goes_on_from_the_journal_bytes(make: Make) -> None:
    whole = run(WorldSession(make(), world()), "wwdlai")
    first = WorldSession(make(), world())
    run(first, "wwdl")
    saved = [entry.to_bytes() for entry in first.journal]
    second = WorldSession(make(cut=(0, 1, 4)), world(), [JournalEntry.from_bytes(data) for data in saved])
    assert second.keys == first.keys
    assert second.resume() == Receipt(4, None, 4)
    assert same(run(second, "ai"), whole)


@pytest.mark.parametrize("window", WINDOWS)
def test_a_fork_equals_a_cold_run_of_its_path(make: Make, window: tuple[int, int]) -> None:
    session = WorldSession(make(window), world())
    run(session, "wwdl")
    for at in (0, 2, 4):
        twin = session.fork(at)
        got = run(twin, "sj")
        assert same(got, run(WorldSession(make(window), world()), "wwdl"[:at] + "sj"))
    assert same(run(session, "ai"), run(WorldSession(make(window), world()), "wwdlai"))


def test_rewinding_without_rolling_keeps_the_window_and_with_rolling_restores_it(make: Make) -> None:
    session = WorldSession(make((6, 2)), world())
    run(session, "wwd")  # six frames: nothing dropped
    session.rewind(2)
    assert session.generate(keys(2, "a")) == Receipt(2, None, 0)
    run(session, "li")
    session.rewind(3)
    assert session.generate(keys(3, "s")) == Receipt(3, 3, 0)
    assert same(latents(session), run(WorldSession(make((6, 2)), world()), "wwas"))


def test_a_changed_prompt_acts_from_its_chunk_on_and_returns_with_a_rewind(make: Make) -> None:
    session = WorldSession(make(), world())
    run(session, "w")
    session.generate(keys(1, "w", "the rain begins"))
    run(session, "ww")
    plain = run(WorldSession(make(), world()), "wwww")
    assert torch.equal(plain[0], session.journal[0].latents)
    assert not any(torch.equal(a, b) for a, b in zip(plain[1:], latents(session)[1:], strict=True))
    replayed = WorldSession(make(costs=REPLAYS), world(), session.journal)
    assert same(run(replayed, "d"), run(session, "d"))
    session.rewind(1)
    assert same(run(session, "www"), plain)


def test_a_changed_prompt_stays_in_force(make: Make) -> None:
    once, always = WorldSession(make(), world()), WorldSession(make(), world())
    for chunk in range(3):
        once.generate(keys(chunk, "w", "the rain begins" if chunk == 0 else None))
        always.generate(keys(chunk, "w", "the rain begins"))
    assert same(latents(once), latents(always))


def test_poses_and_keys_meet_in_one_world(make: Make) -> None:
    pose = torch.eye(4).double().numpy()
    pose[:3, 3] = [0.3, 0, 1]
    whole, session = WorldSession(make(), world()), WorldSession(make(costs=REPLAYS, budget=0), world())
    for one in (whole, session):
        run(one, "w")
        one.generate(ChunkControls(Poses.of([pose, pose])))
        if one is session:
            one.park()
        run(one, "d")
    assert same(latents(session), latents(whole))


def test_everything_a_world_is_opened_with_matters(make: Make) -> None:
    base = run(WorldSession(make(), world()), "ww")
    other_image = World(world().root, world().condition + 1, world().prompt, 3, HEIGHT, WIDTH)
    for other in (world(seed=4), world(prompt="a blue square"), other_image):
        assert not torch.equal(run(WorldSession(make(), other), "w")[0], base[0])
    assert not torch.equal(run(WorldSession(make(), world()), "wd")[1], base[1])


def test_adopted_chunks_cost_nothing_until_one_is_made(make: Make) -> None:
    first = WorldSession(make(), world())
    run(first, "wwdl")
    second = WorldSession(make(), world())
    for entry in first.journal:
        assert second.next_key(entry.controls) == first.keys[len(second.journal)]
        second.adopt(entry)
    assert second.live_bytes == 0
    assert second.keys == tuple(path_keys(world().root, [e.controls.canonical() for e in first.journal]))
    assert same(run(second, "a"), run(first, "a"))
    with pytest.raises(ValueError, match=r"latents: got \[1, 16, 2, 4, 5\], expected \[1, 16, 2, 4, 6\]"):
        second.adopt(JournalEntry(keys(5, "w"), torch.zeros(1, 16, 2, 4, 5)))


@pytest.mark.parametrize("failing", ["denoise", "clean"])
@pytest.mark.parametrize("after", ["again", "rewind", "adopt"])
def test_a_failure_in_mid_chunk_is_undone_by_the_next_one(
    make: Make, failing: str, after: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = WorldSession(make(), world())
    run(whole, "wwdl")
    session = WorldSession(make(cut=(0, 2, 4), budget=0), world())
    run(session, "wwd")
    assert session._live is not None

    def fail(*_: object) -> None:
        raise RuntimeError("device lost")

    with monkeypatch.context() as patch:
        patch.setattr(session._live[1], failing, fail)
        with pytest.raises(RuntimeError, match="device lost"):
            session.generate(keys(3, "l"))
    assert len(session.journal) == 3
    if after == "rewind":
        session.rewind(2)
        run(session, "d")
    if after == "adopt":
        session.adopt(whole.journal[3])
    run(session, "la"[len(session.journal) - 3 :])
    assert same(latents(session), run(whole, "a"))


def test_wrong_controls_and_boundaries_are_refused_and_change_nothing(make: Make) -> None:
    session = WorldSession(make(), world())
    run(session, "w")
    with pytest.raises(ValueError, match="controls: got 4 frames of keys, expected 8 for chunk 1"):
        session.generate(keys(0, "w"))
    for call in (session.rewind, session.fork):
        with pytest.raises(ValueError, match="chunks: got 2, expected 0 to 1"):
            call(2)
    assert same(run(session, "d"), run(WorldSession(make(), world()), "wd"))


@pytest.mark.parametrize("window", WINDOWS)
def test_stated_bytes_cover_a_session(make: Make, checkpoint: WorldCheckpoint, window: tuple[int, int]) -> None:
    engine = make(window)
    session = WorldSession(engine, world())
    run(session, "wwdla")
    stated = session_bytes(checkpoint.config, 4, engine.stream, HEIGHT, WIDTH, torch.float32, 5)
    assert session.live_bytes <= stated <= 3.5 * session.live_bytes


class ColdOracle:
    """Latents of a path from fresh sessions, each chunk of a path computed once."""

    def __init__(self, make: Make, window: tuple[int, int]) -> None:
        self._make, self._window = make, window
        self._known: dict[Key, Tensor] = {}

    def check(self, session: WorldSession) -> None:
        """Recompute the path cold, unless every chunk of it has been."""
        if all(key in self._known for key in session.keys):
            expected = [self._known[key] for key in session.keys]
        else:
            cold = WorldSession(self._make(self._window, budget=0), session._world)
            for entry in session.journal:
                cold.generate(entry.controls)
            expected = latents(cold)
            self._known |= zip(cold.keys, expected, strict=True)
        assert same(latents(session), expected)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize(("seed", "count", "operations"), [(0, 3, 30), pytest.param(1, 8, 500, marks=pytest.mark.slow)])
def test_random_operations_on_several_sessions(
    make: Make, window: tuple[int, int], seed: int, count: int, operations: int
) -> None:
    """Chunks, forks, rewinds, parks, resumes, kills and vanishing blobs in any order; one engine of two stages."""
    draw, oracle = random.Random(seed), ColdOracle(make, window)
    small = 6 * 2 * 2 * 12 * 64 * 4  # about six chunks of a stage: blobs come and go
    engine = make(window, cut=(0, 2, 4), costs=draw.choice([RESTORES, REPLAYS]), budget=small)
    sessions = [WorldSession(engine, world(seed=1 + i % 2)) for i in range(count)]
    saved: dict[int, list[bytes]] = {}
    for _ in range(operations):
        i = draw.randrange(len(sessions))
        session = sessions[i]
        length = len(session.journal)
        match draw.choice(["chunk"] * 5 + ["fork", "rewind", "park", "resume", "kill", "lose"]):
            case "chunk" if length < 8:
                prompt = draw.choice([None, None, None, "rain"])
                session.generate(keys(length, draw.choice(["w", "d", "iw"]), prompt))
            case "fork" | "chunk":
                sessions[draw.randrange(len(sessions))] = session.fork(draw.randint(0, length))
            case "rewind":
                session.rewind(draw.randint(max(0, length - 3), length))
            case "park":
                session.park()
            case "resume":
                session.resume()
            case "kill":
                saved[i] = [entry.to_bytes() for entry in session.journal]
                sessions[i] = WorldSession(engine, session._world, [JournalEntry.from_bytes(d) for d in saved[i]])
            case "lose":
                for store in engine.stores:
                    for key in session.keys:
                        if draw.random() < 0.5:
                            store.drop(key)
        if operations > 100 and draw.random() < 0.1:
            oracle.check(session)
    for session in sessions:
        run(session, "w")
        oracle.check(session)
