"""What a gang is given for a path and a plan."""

from __future__ import annotations

import pytest
import torch

from app.planning.world_task import camera_after, task_tensors, world_task
from cache_actors.keys import path_keys
from deployments.lingbot.camera_path import CameraPolicy, CameraState
from deployments.lingbot.controls import ChunkControls, Keys, key_frames
from deployments.lingbot.session import World
from deployments.lingbot.world_plan import Pass, WorldPlan
from deployments.lingbot.world_task import WorldTask

WORLD = World(b"r" * 32, torch.zeros(20, 31, 2, 2), "sun", 3, 16, 16)
PROMPTS = [None, "rain", None, "sun"]
PATH = [ChunkControls(Keys((frozenset("w"),) * key_frames(chunk, 1)), prompt) for chunk, prompt in enumerate(PROMPTS)]
LATENTS = [torch.full((1, 16, 1, 2, 2), float(chunk)) for chunk in range(3)]


def task(*passes: Pass, live: int = 0) -> WorldTask:
    return world_task("one", WORLD, PATH, WorldPlan(2, passes, 0), live=live, policy=CameraPolicy())


def test_a_replay_and_a_new_chunk_from_a_live_window() -> None:
    got = task(Pass("clean", 2), Pass("denoise", 3), Pass("clean", 3), live=2)
    assert (got.live, got.first, got.prompts) == (2, 2, ("sun", "rain"))
    assert [(chunk.controls.encode(), chunk.prompt) for chunk in got.chunks] == [
        (PATH[2].canonical(), 1),
        (PATH[3].canonical(), 0),
    ]
    assert [bytes.fromhex(key) for key in got.keys] == path_keys(WORLD.root, [c.canonical() for c in PATH])
    assert got.camera.pose[11] == pytest.approx(4 * 0.05)  # chunk 0 of one latent stands still, chunk 1 has four steps
    tensors = task_tensors(got, WORLD.condition, lambda prompt: torch.ones(len(prompt), 2), LATENTS)
    assert tensors.keys() == {"condition", "text.0", "text.1", "latents.2"}
    assert torch.equal(tensors["latents.2"], LATENTS[2])
    assert len(tensors["text.1"]) == 4


def test_a_restored_window_needs_no_live_one() -> None:
    assert task(Pass("restore", 3), Pass("denoise", 3), Pass("clean", 3), live=1).live == 0


def test_a_plan_without_passes_over_chunks_has_none() -> None:
    got = task(Pass("restore", 4))
    assert (got.first, got.chunks) == (4, ())
    assert got.camera == camera_after(PATH, CameraPolicy()) != CameraState()
