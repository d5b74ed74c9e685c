"""Where the camera is: keys or poses to absolute camera-to-world matrices.  numpy only: a driver follows the path too.

Cameras are OpenCV's: x right, y down, z forward.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import cos, radians, sin

import numpy as np

from deployments.lingbot.controls import ChunkControls, Poses
from deployments.lingbot.stream_config import FRAMES_PER_LATENT

CAMERA_VERSION = 1
"""Part of every world key: other arithmetic for the same controls is another world."""


@dataclass(frozen=True)
class CameraPolicy:
    """How keys move the camera and how poses become a control."""

    move_step: float = 0.05
    """World units a video frame."""
    turn_step: float = 2.0
    """Degrees a video frame."""
    pitch_limit: float = 85.0
    """Degrees; a turn that would pass it does not happen."""
    translation_scale: float = 3.0
    """Length that a chunk's largest step between latent frames is given."""
    intrinsics: tuple[float, float, float, float] = (416.0, 416.0, 416.0, 240.0)
    """fx, fy, cx, cy in pixels of a 480x832 frame; the default sees 90 degrees from left to right."""


@dataclass(frozen=True)
class CameraState:
    """Where the camera is after a chunk."""

    pose: tuple[float, ...] = (1.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0)
    """Upper three rows of the camera-to-world matrix, fp64."""
    pitch: float = 0.0
    """Degrees upwards, of keys alone: given poses leave it."""

    def matrix(self) -> np.ndarray:
        """[4, 4] fp64."""
        return np.vstack([np.array(self.pose, dtype=np.float64).reshape(3, 4), [0.0, 0.0, 0.0, 1.0]])


def advance_camera(
    state: CameraState, controls: ChunkControls, first_chunk: bool, policy: CameraPolicy
) -> tuple[np.ndarray, CameraState]:
    """The chunk's absolute poses [c, 4, 4] fp64, and the state after it.

    Keys of a world's first chunk begin with the start pose itself; later chunks begin one latent after the last one.
    """
    if isinstance(controls.camera, Poses):
        poses = controls.camera.matrices()
        return poses, CameraState(tuple(poses[-1, :3].flatten().tolist()), state.pitch)
    pose, pitch = state.matrix(), state.pitch
    poses_made = [pose] if first_chunk else []
    for frame, held in enumerate(controls.camera.frames, start=1):
        pose, pitch = _step(pose, pitch, held, policy)
        if frame % FRAMES_PER_LATENT == 0:
            poses_made.append(pose)
    return np.stack(poses_made), CameraState(tuple(pose[:3].flatten().tolist()), pitch)


def _step(pose: np.ndarray, pitch: float, held: frozenset[str], policy: CameraPolicy) -> tuple[np.ndarray, float]:
    """One video frame of held keys: turn, then move in the plane y = 0."""
    tilt = policy.turn_step * (("i" in held) - ("k" in held))
    if abs(pitch + tilt) > policy.pitch_limit:
        tilt = 0.0
    turn = policy.turn_step * (("l" in held) - ("j" in held))
    rotation = _about_y(radians(turn)) @ pose[:3, :3] @ _about_x(radians(tilt))
    forward, right = rotation[:, 2].copy(), rotation[:, 0].copy()
    for axis in (forward, right):
        axis[1] = 0.0
        axis /= np.sqrt((axis**2).sum()) + 1e-6
    out = np.eye(4)
    out[:3, :3] = rotation
    ahead, aside = ("w" in held) - ("s" in held), ("d" in held) - ("a" in held)
    out[:3, 3] = pose[:3, 3] + policy.move_step * (ahead * forward + aside * right)
    return out, pitch + tilt


def _about_y(angle: float) -> np.ndarray:
    """Positive turns right: z goes towards x."""
    return np.array([[cos(angle), 0, sin(angle)], [0, 1, 0], [-sin(angle), 0, cos(angle)]])


def _about_x(angle: float) -> np.ndarray:
    """Positive looks up: z goes towards -y."""
    return np.array([[1, 0, 0], [0, cos(angle), -sin(angle)], [0, sin(angle), cos(angle)]])
