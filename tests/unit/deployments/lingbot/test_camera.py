"""The control tensor against a pixel-by-pixel oracle."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from deployments.lingbot.camera import control_tensor
from deployments.lingbot.camera_path import CameraPolicy, CameraState, advance_camera
from deployments.lingbot.controls import ChunkControls, Keys

POLICY = CameraPolicy()


def held(keys: str, frames: int) -> ChunkControls:
    return ChunkControls(Keys((frozenset(keys),) * frames))


def oracle(previous: np.ndarray, poses: np.ndarray, height: int, width: int, policy: CameraPolicy) -> np.ndarray:
    """Channel by channel, pixel by pixel: [384, c, h, w]."""
    out = np.zeros((384, len(poses), height // 8, width // 8))
    moves = [np.linalg.inv(a) @ b for a, b in zip([previous, *poses[:-1]], poses, strict=True)]
    longest = max(np.linalg.norm(m[:3, 3]) for m in moves) or 1.0
    fx, fy, cx, cy = policy.intrinsics
    for f, move in enumerate(moves):
        for y in range(height):
            for x in range(width):
                ray = np.array([(x + 0.5 - cx * width / 832) / (fx * width / 832), 0, 1])
                ray[1] = (y + 0.5 - cy * height / 480) / (fy * height / 480)
                ray = move[:3, :3] @ (ray / np.linalg.norm(ray))
                origin = move[:3, 3] / longest * policy.translation_scale
                for channel, value in enumerate([*origin, *ray]):
                    out[channel * 64 + (y % 8) * 8 + x % 8, f, y // 8, x // 8] = value
    return out


@pytest.mark.parametrize("first", [True, False])
def test_control_equals_the_oracle(first: bool) -> None:
    policy = CameraPolicy(intrinsics=(500.0, 450.0, 400.0, 250.0))
    _, before = advance_camera(CameraState(), held("wil", 12), False, policy)
    poses, _ = advance_camera(before, held("dkj", 8), first, policy)
    control = control_tensor(before, poses, first, 16, 32, policy)
    expected = oracle(poses[0] if first else before.matrix(), poses, 16, 32, policy)
    assert control.shape == (1, 384, len(poses), 2, 4)
    assert control.dtype == torch.float32
    # fp64 arithmetic in another order, rounded to fp32: half a unit in the last place of values up to 3.
    assert np.abs(control[0].numpy() - expected).max() < 3e-7


def test_step_size_cancels_and_the_scale_does_not() -> None:
    def control(policy: CameraPolicy) -> torch.Tensor:
        poses, _ = advance_camera(CameraState(), held("w", 12), False, policy)
        return control_tensor(CameraState(), poses, False, 16, 16, policy)

    # The forward vector is divided by its norm + 1e-6 in both, so only rounding differs.
    assert torch.allclose(control(CameraPolicy(move_step=0.5)), control(POLICY), atol=1e-6)
    assert not torch.allclose(control(CameraPolicy(translation_scale=1.0)), control(POLICY), atol=1e-1)


def test_a_still_camera_has_no_origin() -> None:
    poses, _ = advance_camera(CameraState(), held("", 12), False, POLICY)
    control = control_tensor(CameraState(), poses, False, 16, 16, POLICY)
    assert control[:, :192].abs().max() == 0
    assert control[:, 192:].abs().max() > 0.9
