"""Sessions and the world cache together: cold, full hit, fork and the same fork cold, with frames, in one process."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch
from diffusers import AutoencoderKLWan

from cache_actors.keys import Key
from cache_actors.world_cache import NodeGone, WorldCache
from deployments.lingbot.camera_path import CameraPolicy
from deployments.lingbot.checkpoint import VAE_FILE, WorldCheckpoint, load_stage
from deployments.lingbot.controls import ChunkControls, Keys, key_frames
from deployments.lingbot.fast_forward import ChunkCosts
from deployments.lingbot.journal import JournalEntry
from deployments.lingbot.kv_store import KVStore
from deployments.lingbot.sampler_tables import V1_FAST
from deployments.lingbot.session import World, WorldEngine, WorldSession
from deployments.lingbot.stream_config import StreamConfig
from deployments.lingbot.stream_decoder import StreamDecoder
from deployments.lingbot.text_encoder import WorldTextEncoder
from deployments.lingbot.vae import load_vae
from tests.world_material import MATERIAL

CPU, CHUNK, SIZE = torch.device("cpu"), 2, (16, 32)


@pytest.fixture(scope="module")
def text(world_folder: Path) -> WorldTextEncoder:
    return WorldTextEncoder(world_folder, 16, torch.float32, CPU)


def engine(checkpoint: WorldCheckpoint, text: WorldTextEncoder, window: tuple[int, int]) -> WorldEngine:
    """As a process that has just started: no keys and values kept."""
    stages = tuple(load_stage(checkpoint, range(a, a + 2), dtype=torch.float32, device=CPU) for a in (0, 2))
    costs = ChunkCosts(generate=5, clean=1, restore=0.1, decode=1, frames=0.1)
    stream = StreamConfig(CHUNK, *window, V1_FAST)
    return WorldEngine(stages, (KVStore(1 << 20), KVStore(1 << 20)), stream, CameraPolicy(), costs, text.encode)


def play(engine: WorldEngine, cache: WorldCache | None, root: Key, path: str) -> tuple[int, list[torch.Tensor]]:
    """Fast-forwards over the prefix that the cache knows, makes the rest; how far, and the latents of every chunk."""
    condition = torch.randn(20, 31, SIZE[0] // 8, SIZE[1] // 8, generator=torch.Generator().manual_seed(1))
    session, known = WorldSession(engine, World(root, condition, "a red circle", 5, *SIZE)), 0
    for held in path:
        chunk = len(session.journal)
        controls = ChunkControls(Keys((frozenset(held),) * key_frames(chunk, CHUNK)))
        parent, key = (session.keys or (root,))[-1], session.next_key(controls)
        if cache is not None and known == chunk and cache.find(key) is not None:
            try:
                session.adopt(JournalEntry.from_bytes(cache.read(key)))
                known += 1
            except NodeGone:
                pass
        if len(session.journal) == chunk:
            session.generate(controls)
            if cache is not None:
                assert cache.put(root, parent, controls.canonical(), session.journal[-1].to_bytes()) == key
    return known, [entry.latents for entry in session.journal]


def digests(latents: list[torch.Tensor]) -> list[str]:
    return [hashlib.sha256(x.numpy().tobytes()).hexdigest() for x in latents]


def frames(vae: AutoencoderKLWan, latents: list[torch.Tensor]) -> list[str]:
    """The digest of every frame, decoded chunk by chunk."""
    decoder = StreamDecoder(vae)
    state = decoder.start()
    return [hashlib.sha256(frame.tobytes()).hexdigest() for x in latents for frame in decoder.decode(x, state)]


@pytest.mark.parametrize("window", [(-1, 0), (6, 2), (5, 1)])
def test_a_cold_b_full_hit_c_fork_d_fork_cold(
    checkpoint: WorldCheckpoint, text: WorldTextEncoder, window: tuple[int, int], tmp_path: Path
) -> None:
    main, fork = "wwdld", "wwdsa"

    def run(path: str, name: str = "shared") -> tuple[int, list[str]]:
        cache = WorldCache(tmp_path / name, 1 << 26)  # opened anew each time, as by a new process
        try:
            known, latents = play(engine(checkpoint, text, window), cache, cache.open_world(MATERIAL), path)
        finally:
            cache.close()
        return known, digests(latents)

    a, b, c, d = run(main), run(main), run(fork), run(fork, "fresh")
    longer = run(main + "j")
    assert [known for known, _ in (a, b, c, d, longer)] == [0, 5, 3, 0, 5]
    assert len({*a[1], *c[1]}) == 7
    assert b[1] == a[1]
    assert c[1] == d[1]
    assert c[1][:3] == a[1][:3]
    assert longer[1][:5] == a[1]
    assert longer[1] == digests(play(engine(checkpoint, text, window), None, b"x" * 32, main + "j")[1])


def test_frames_of_a_hit_equal_those_of_a_cold_run(
    checkpoint: WorldCheckpoint, text: WorldTextEncoder, tmp_path: Path, world_folder: Path
) -> None:
    vae, cache = load_vae(world_folder / VAE_FILE, torch.float32, CPU), WorldCache(tmp_path / "worlds", 1 << 26)
    root = cache.open_world(MATERIAL)
    cold = frames(vae, play(engine(checkpoint, text, (5, 1)), cache, root, "wwd")[1])
    known, latents = play(engine(checkpoint, text, (5, 1)), cache, root, "wwl")
    fork = frames(vae, latents)
    assert known == 2
    assert len(cold) == len(fork) == 5 + 2 * 8
    assert len(set(cold)) == len(cold)
    assert (fork[:13], set(fork[13:]) & set(cold)) == (cold[:13], set())
    cache.close()


def test_a_damaged_chunk_is_made_again_with_the_same_bits(
    checkpoint: WorldCheckpoint, text: WorldTextEncoder, tmp_path: Path
) -> None:
    cache = WorldCache(tmp_path / "worlds", 1 << 26)
    root = cache.open_world(MATERIAL)
    cold = digests(play(engine(checkpoint, text, (5, 1)), cache, root, "wwdl")[1])
    for path in (tmp_path / "worlds/entries" / root.hex()).glob("*/journal"):
        if b'depth": 3' in (path.parent / "manifest.json").read_bytes():
            data = bytearray(path.read_bytes())
            data[-1] ^= 1
            path.write_bytes(data)
    known, latents = play(engine(checkpoint, text, (5, 1)), cache, root, "wwdl")
    assert (known, digests(latents)) == (2, cold)
    assert cache.stats()["quarantined"] == 1
    assert play(engine(checkpoint, text, (5, 1)), cache, root, "wwdl")[0] == 4
    cache.close()
