"""World workers in a gang: any number of ranks makes what one session core makes in one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from deployments.lingbot.camera_path import CameraPolicy
from deployments.lingbot.checkpoint import WorldCheckpoint, load_stage
from deployments.lingbot.controls import ChunkControls, Keys, key_frames
from deployments.lingbot.fast_forward import ChunkCosts
from deployments.lingbot.kv_store import KVStore
from deployments.lingbot.sampler_tables import V1_FAST
from deployments.lingbot.session import World, WorldEngine, WorldSession
from deployments.lingbot.stream_config import StreamConfig
from tests.world_gangs import Act, WorldClient, WorldGangSpec, play_worlds

HEIGHT, WIDTH = 32, 48
STREAM = StreamConfig(2, 5, 1, V1_FAST)
RESTORES = ChunkCosts(generate=5, clean=1, restore=0.1, decode=1, frames=0.1)
TEXTS = {p: torch.randn(2 + i, 48, generator=torch.Generator().manual_seed(i)) for i, p in enumerate(["sun", "rain"])}


def world(seed: int) -> World:
    condition = torch.randn(20, 31, HEIGHT // 8, WIDTH // 8, generator=torch.Generator().manual_seed(seed))
    return World(bytes([seed]) * 32, condition, "sun", seed, HEIGHT, WIDTH)


def controls(path: str, start: int = 0) -> tuple[ChunkControls, ...]:
    """A letter a chunk: the key held; R changes the prompt."""
    return tuple(
        ChunkControls(Keys((frozenset(c.lower().replace("r", "w")),) * key_frames(i, 2)), "rain" if c == "R" else None)
        for i, c in enumerate(path, start=start)
    )


def alone(checkpoint: WorldCheckpoint, seed: int, path: str) -> list[Tensor]:
    """The session core, uninterrupted."""
    stage = load_stage(checkpoint, range(4), dtype=torch.float32, device=torch.device("cpu"))
    engine = WorldEngine((stage,), (KVStore(0),), STREAM, CameraPolicy(), RESTORES, TEXTS.__getitem__)
    session = WorldSession(engine, world(seed))
    for one in controls(path):
        session.generate(one)
    return [entry.latents for entry in session.journal]


def clients(*seeds: int, costs: ChunkCosts = RESTORES) -> list[WorldClient]:
    return [WorldClient(f"world-{seed}", world(seed), STREAM, costs, TEXTS) for seed in seeds]


def latents(results: dict[str, Tensor], world: int) -> list[Tensor]:
    return [results[f"{world}.{chunk}"] for chunk in range(sum(name.startswith(f"{world}.") for name in results))]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


ACTS = [
    Act(0, controls("ww"), at_once=True),
    Act(1, controls("dR")),  # both at once
    Act(0, controls("l", 2)),
    Act(2, controls("s")),  # a third world parks the second
    Act(1, controls("ww", 2)),  # which comes back, from its keys and values, and parks the first
    Act(0, controls("ai", 2), rewind_to=2),  # a rewind of a parked world
    Act(0, (), rewind_to=3),
]


@pytest.mark.parametrize("pp", [1, 2, 4])
def test_a_gang_equals_the_session_core(
    pp: int, checkpoint: WorldCheckpoint, world_folder: Path, tmp_path: Path
) -> None:
    spec = WorldGangSpec(str(world_folder), STREAM, pp)
    results = play_worlds(spec, clients(1, 2, 3), ACTS, tmp_path)
    assert same(latents(results, 0), alone(checkpoint, 1, "wwa"))
    assert same(latents(results, 1), alone(checkpoint, 2, "dRww"))
    assert same(latents(results, 2), alone(checkpoint, 3, "s"))
    # stale, restores, denoise passes, clean passes
    assert [results[f"ops.{i}"].tolist() for i in range(len(ACTS))] == [
        [0, 0, 8, 2],
        [0, 0, 8, 2],
        [0, 0, 4, 1],
        [0, 0, 4, 1],
        [0, 1, 8, 2],
        [0, 1, 8, 2],
        [0, 1, 0, 0],
    ]


def test_without_kept_keys_and_values_a_parked_world_is_replayed(
    checkpoint: WorldCheckpoint, world_folder: Path, tmp_path: Path
) -> None:
    spec = WorldGangSpec(str(world_folder), STREAM, 2, max_worlds=1, kv_bytes_per_block=0, in_flight=1)
    acts = [Act(0, controls("wRd")), Act(1, controls("s")), Act(0, controls("w", 3))]
    results = play_worlds(spec, clients(1, 2), acts, tmp_path)
    assert same(latents(results, 0), alone(checkpoint, 1, "wRdw"))
    assert results["ops.2"].tolist() == [0, 0, 4, 4]


def test_a_plan_made_on_what_has_changed_is_stale_and_computes_nothing(
    checkpoint: WorldCheckpoint, world_folder: Path, tmp_path: Path
) -> None:
    """Both requests are planned before either runs; the first parks the world that the second goes on from."""
    spec = WorldGangSpec(str(world_folder), STREAM, 1, max_worlds=1, kv_bytes_per_block=0, in_flight=1)
    acts = [
        Act(0, controls("w")),
        Act(1, controls("s"), at_once=True),
        Act(0, controls("d", 1)),
        Act(0, controls("d", 1)),
    ]
    results = play_worlds(spec, clients(1, 2), acts, tmp_path)
    assert results["ops.2"].tolist() == [1, 0, 0, 0]
    assert results["ops.3"].tolist() == [0, 0, 4, 2]
    assert same(latents(results, 0), alone(checkpoint, 1, "wd"))
