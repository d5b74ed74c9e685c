"""Whatever decides a world's pixels changes its root; how it is cut into stages and how long it gets does not."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from cache_actors.keys import Key, WorldMaterial, node_key, world_root
from deployments.lingbot.camera_path import CameraPolicy
from deployments.lingbot.controls import ChunkControls, Keys, Poses
from deployments.lingbot.sampler_tables import V2_1_3B, V2_14B
from deployments.lingbot.stream_config import StreamConfig
from deployments.lingbot.world_key import world_material

FINGERPRINTS = {"transformer": "a" * 64, "vae": "b" * 64, "text_encoder": "c" * 64}
STREAM = StreamConfig(4, 18, 6, V2_1_3B)
ASK: dict[str, Any] = {
    "device": torch.device("cpu"),
    "dtype": torch.bfloat16,
    "vae_dtype": torch.bfloat16,
    "max_prompt_tokens": 512,
    "image": torch.arange(24, dtype=torch.uint8).reshape(2, 4, 3),
    "prompt": "a room",
    "seed": 1,
    "height": 464,
    "width": 832,
}


def root(
    fingerprints: dict[str, str] = FINGERPRINTS,
    stream: StreamConfig = STREAM,
    camera: CameraPolicy = CameraPolicy(),  # noqa: B008 (frozen)
    **changes: Any,
) -> Key:
    return world_root(world_material(fingerprints, stream, camera, **{**ASK, **changes}))


OTHERS: dict[str, dict[str, Any]] = {
    "image": {"image": ASK["image"] + 1},
    "image's size": {"image": ASK["image"].reshape(4, 2, 3)},
    "seed": {"seed": 2},
    "prompt": {"prompt": "a hall"},
    "height": {"height": 480},
    "width": {"width": 848},
    "dtype": {"dtype": torch.float32},
    "dtype of the VAE": {"vae_dtype": torch.float32},
    "timesteps": {"stream": replace(STREAM, sampler=V2_14B)},
    "one sigma": {
        "stream": replace(STREAM, sampler=replace(V2_1_3B, sigma_noise=(0.937577784, 0.833055377, 0.624687375)))
    },
    "window": {"stream": replace(STREAM, window=20)},
    "sink": {"stream": replace(STREAM, sink=4)},
    "chunk": {"stream": replace(STREAM, chunk=3)},
    "transformer": {"fingerprints": FINGERPRINTS | {"transformer": "d" * 64}},
    "vae": {"fingerprints": FINGERPRINTS | {"vae": "d" * 64}},
    "text encoder": {"fingerprints": FINGERPRINTS | {"text_encoder": "d" * 64}},
    "prompt length": {"max_prompt_tokens": 256},
    "move step": {"camera": CameraPolicy(move_step=0.1)},
    "turn step": {"camera": CameraPolicy(turn_step=0.5)},
    "pitch limit": {"camera": CameraPolicy(pitch_limit=80)},
    "translation scale": {"camera": CameraPolicy(translation_scale=1)},
    "intrinsics": {"camera": CameraPolicy(intrinsics=(400.0, 400.0, 416.0, 240.0))},
}


@pytest.mark.parametrize("what", OTHERS)
def test_another_world_has_another_root(what: str) -> None:
    assert root(**OTHERS[what]) != root()


def test_the_same_world_has_the_same_root() -> None:
    again = {**ASK, "image": ASK["image"].clone()}
    assert world_root(world_material(dict(FINGERPRINTS), replace(STREAM), CameraPolicy(), **again)) == root()


def test_frames_a_second_do_not_matter() -> None:
    assert root(stream=replace(STREAM, fps=24)) == root()


def test_every_field_of_the_material_changes_the_root() -> None:
    """Also those that are constant in this version."""
    base = world_material(FINGERPRINTS, STREAM, CameraPolicy(), **ASK)
    other = {str: "other", int: 77, float: 0.77, bool: False, tuple: (7.5,)}
    for field in fields(WorldMaterial):
        value = getattr(base, field.name)
        changed = not value if isinstance(value, bool) else other[type(value)]
        assert world_root(replace(base, **{field.name: changed})) != world_root(base), field.name


def test_one_changed_pose_key_or_prompt_is_another_chunk() -> None:
    poses = torch.eye(4).double().repeat(4, 1, 1).numpy()
    moved = poses.copy()
    moved[2, 0, 3] = 2e-6  # two steps of the grid
    held = Keys((frozenset("w"),) * 12)
    later = Keys((*held.frames[:-1], frozenset()))
    chunks = [
        ChunkControls(camera, prompt)
        for camera in (Poses.of(poses), Poses.of(moved), held, later)
        for prompt in (None, "rain")
    ]
    keys = {node_key(root(), chunk.canonical()) for chunk in chunks}
    assert len(keys) == len(chunks)
    assert node_key(root(), ChunkControls(Poses.of(poses.copy())).canonical()) in keys
