"""The control tensor of a chunk: the ray of every pixel, seen from the frame before.

A chunk's control depends on its own poses and the last pose before it, on nothing later: translations are divided by
the largest step of this chunk, so a world can be steered while it is made.  With steps of one length that division
cancels the length, and `translation_scale` alone sets the speed.

Axes: c latent frames of the chunk, H/W pixels, h/w latents.
"""

from __future__ import annotations

from functools import lru_cache

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
    directions = _pixel_directions(height, width, policy.intrinsics)
    rows, columns = height // VAE_STRIDE, width // VAE_STRIDE
    # Pixels of a latent become channels: (channel, row in latent, column in latent).
    out = np.empty((6, VAE_STRIDE, VAE_STRIDE, len(poses), rows, columns), dtype=np.float32)
    out[:3] = translation.T[:, None, None, :, None, None]
    for frame, axis in np.ndindex(len(poses), 3):
        # Product by product: sums of a matrix product are ordered differently on different processors.
        x, y, z = (r * d for r, d in zip(rotation[frame, axis], directions, strict=True))
        out[3 + axis, :, :, frame] = x + y + z
    return torch.from_numpy(out.reshape(1, 6 * VAE_STRIDE**2, len(poses), rows, columns))


def _inverse(pose: np.ndarray) -> np.ndarray:
    """Of a rigid motion: the rotation transposed."""
    out = np.eye(4)
    out[:3, :3] = pose[:3, :3].T
    out[:3, 3] = -(pose[:3, :3].T @ pose[:3, 3])
    return out


@lru_cache(maxsize=4)
def _pixel_directions(height: int, width: int, intrinsics: tuple[float, float, float, float]) -> np.ndarray:
    """Unit vectors from the camera through the pixels' centres; the same for every chunk of a size.

    [3, 8, 8, h, w]: the pixel's row and column in its latent, then the latent's.
    """
    fx, fy, cx, cy = intrinsics
    across, down = width / INTRINSICS_WIDTH, height / INTRINSICS_HEIGHT
    x = (np.arange(width) + 0.5 - cx * across) / (fx * across)
    y = (np.arange(height) + 0.5 - cy * down) / (fy * down)
    unit = np.stack(np.broadcast_arrays(x[None, :], y[:, None], 1.0))
    unit /= np.sqrt((unit**2).sum(axis=0, keepdims=True))
    cells = unit.reshape(3, height // VAE_STRIDE, VAE_STRIDE, width // VAE_STRIDE, VAE_STRIDE)
    out = np.ascontiguousarray(cells.transpose(0, 2, 4, 1, 3))
    out.flags.writeable = False
    return out
