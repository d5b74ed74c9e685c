"""The control tensor of a chunk: the ray of every pixel, seen from the frame before.

A chunk's control depends on its own poses and the last pose before it, on nothing later: translations are divided by
the largest step of this chunk, so a world can be steered while it is made.  With steps of one length that division
cancels the length, and `translation_scale` alone sets the speed.

Axes: c latent frames of the chunk, H/W pixels, h/w latents.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from deployments.lingbot.camera_path import CameraPolicy, CameraState
from deployments.lingbot.stream_config import VAE_STRIDE

INTRINSICS_HEIGHT, INTRINSICS_WIDTH = 480, 832
"""The frame that intrinsics are given for."""


def control_tensor(
    before: CameraState, poses: np.ndarray, first_chunk: bool, height: int, width: int, policy: CameraPolicy
) -> Tensor:
    """The control [1, 384, c, h, w] fp32 of a chunk.

    before: after the chunk before; of a world's first chunk the poses count from the first of them.
    poses: [c, 4, 4] fp64.  height, width: pixels.
    """
    previous = poses[0] if first_chunk else before.matrix()
    moves = np.stack([_inverse(a) @ b for a, b in zip([previous, *poses[:-1]], poses, strict=True)])
    rotation, translation = moves[:, :3, :3], moves[:, :3, 3]
    longest = np.sqrt((translation**2).sum(axis=1)).max()
    if longest > 0:
        translation = translation / longest
    translation = translation * policy.translation_scale
    directions = _pixel_directions(height, width, policy.intrinsics)  # [H, W, 3]
    rays = np.einsum("cij,hwj->cihw", rotation, directions)
    origins = np.broadcast_to(translation[:, :, None, None], rays.shape)
    features = torch.from_numpy(np.concatenate([origins, rays], axis=1).astype(np.float32))  # [c, 6, H, W]
    # Pixels of a latent become channels: (channel, row in latent, column in latent).
    return torch.pixel_unshuffle(features, VAE_STRIDE).transpose(0, 1).unsqueeze(0).contiguous()


def _inverse(pose: np.ndarray) -> np.ndarray:
    """Of a rigid motion: the rotation transposed."""
    out = np.eye(4)
    out[:3, :3] = pose[:3, :3].T
    out[:3, 3] = -(pose[:3, :3].T @ pose[:3, 3])
    return out


def _pixel_directions(height: int, width: int, intrinsics: tuple[float, float, float, float]) -> np.ndarray:
    """Unit vectors [H, W, 3] from the camera through the pixels' centres."""
    fx, fy, cx, cy = intrinsics
    across, down = width / INTRINSICS_WIDTH, height / INTRINSICS_HEIGHT
    x = (np.arange(width) + 0.5 - cx * across) / (fx * across)
    y = (np.arange(height) + 0.5 - cy * down) / (fy * down)
    out = np.stack(np.broadcast_arrays(x[None, :], y[:, None], 1.0), axis=-1)
    return out / np.sqrt((out**2).sum(axis=-1, keepdims=True))
