"""What a user asks of one chunk, in canonical form: two requests that mean the same are the same bytes.

Poses are rounded to a grid when they are read, and only the rounded ones are used, so that what the model is given is a
pure function of the canonical bytes.  The bytes are what prefixes are matched by.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from deployments.lingbot.stream_config import FRAMES_PER_LATENT

CONTROLS_VERSION = 1
"""In the canonical bytes: a new meaning of the same request is another version."""

KEYS = "wasdijkl"
"""w, s: forward, back.  a, d: left, right.  i, k: look up, down.  j, l: look left, right."""

POSES_PER_UNIT = 1_000_000
"""Grid of pose matrices: millionths, well below what a pixel's ray shows."""

MAX_COORDINATE = 1_000_000.0
"""Largest entry of a pose matrix."""


@dataclass(frozen=True)
class Keys:
    """Keys held down, one set for each video frame after the one before."""

    frames: tuple[frozenset[str], ...]
    """A chunk of c latents takes 4c, a world's first 4 (c - 1): it begins with the start pose itself."""

    def __post_init__(self) -> None:
        if unknown := sorted(frozenset().union(*self.frames) - set(KEYS)):
            raise ValueError(f"keys: got {unknown}, expected of {' '.join(KEYS)}")


@dataclass(frozen=True)
class Poses:
    """Camera-to-world matrices of a chunk's latent frames, OpenCV axes (x right, y down, z forward), on the grid."""

    grid: tuple[tuple[int, ...], ...]
    """Twelve numbers a frame, the upper three rows in millionths."""

    @classmethod
    def of(cls, matrices: Sequence[Sequence[Sequence[float]]] | np.ndarray) -> Poses:
        """matrices: [c, 4, 4]; the last row 0 0 0 1, the rotation orthonormal to a thousandth."""
        values = np.asarray(matrices, dtype=np.float64)
        if values.ndim != 3 or values.shape[1:] != (4, 4):
            raise ValueError(f"poses: got shape {list(values.shape)}, expected [latent frames, 4, 4]")
        if not np.isfinite(values).all() or np.abs(values).max(initial=0) > MAX_COORDINATE:
            raise ValueError(f"poses: got a number that is not finite or beyond {MAX_COORDINATE:g}")
        rotation = values[:, :3, :3]
        error = np.abs((rotation[:, :, :, None] * rotation[:, :, None, :]).sum(axis=1) - np.eye(3)).max(initial=0)
        if error > 1e-3 or np.abs(values[:, 3] - [0, 0, 0, 1]).max(initial=0) > 0:
            raise ValueError(
                "poses: expected camera-to-world matrices: a rotation (got columns that are not orthonormal by "
                f"{error:.2g}) and the last row 0 0 0 1"
            )
        if (np.linalg.det(rotation) < 0).any():
            raise ValueError("poses: got a reflection, expected rotations: the axes are x right, y down, z forward")
        # Integers know neither -0.0 nor NaN.
        rounded = np.rint(values[:, :3] * POSES_PER_UNIT).astype(np.int64).reshape(-1, 12)
        return cls(tuple(tuple(int(n) for n in row) for row in rounded))

    def matrices(self) -> np.ndarray:
        """[c, 4, 4] fp64, as the model is given them."""
        upper = np.array(self.grid, dtype=np.float64).reshape(-1, 3, 4) / POSES_PER_UNIT
        bottom = np.broadcast_to(np.array([0.0, 0.0, 0.0, 1.0]), (len(upper), 1, 4))
        return np.concatenate([upper, bottom], axis=1)


@dataclass(frozen=True)
class ChunkControls:
    """One chunk's request."""

    camera: Keys | Poses
    prompt: str | None = None
    """Cleaned; the prompt from this chunk on.  None keeps the one before."""

    def check(self, chunk_index: int, chunk: int) -> None:
        """Raises ValueError unless there are as many keys or poses as this chunk of `chunk` latents takes."""
        if isinstance(self.camera, Poses):
            got, wanted, what = len(self.camera.grid), chunk, "poses"
        else:
            got, wanted, what = len(self.camera.frames), key_frames(chunk_index, chunk), "frames of keys"
        if got != wanted:
            raise ValueError(f"controls: got {got} {what}, expected {wanted} for chunk {chunk_index}")

    def canonical(self) -> bytes:
        """The bytes that stand for this request; `from_canonical` is the inverse."""
        camera: dict[str, Any]
        if isinstance(self.camera, Poses):
            camera = {"mode": "poses", "unit": POSES_PER_UNIT, "poses": self.camera.grid}
        else:
            camera = {"mode": "keys", "frames": ["".join(k for k in KEYS if k in held) for held in self.camera.frames]}
        content = {"version": CONTROLS_VERSION, "camera": camera, "prompt": self.prompt}
        return json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()

    @classmethod
    def from_canonical(cls, data: bytes) -> ChunkControls:
        """Raises ValueError for bytes of another version, and ValueError or LookupError for damaged ones."""
        content = json.loads(data)
        if content["version"] != CONTROLS_VERSION:
            raise ValueError(f"controls: got version {content['version']}, expected {CONTROLS_VERSION}")
        camera: Mapping[str, Any] = content["camera"]
        if camera["mode"] == "poses":
            return cls(Poses(tuple(tuple(row) for row in camera["poses"])), content["prompt"])
        return cls(Keys(tuple(frozenset(held) for held in camera["frames"])), content["prompt"])


def key_frames(chunk_index: int, chunk: int) -> int:
    """Sets of keys that a chunk of `chunk` latents takes.  chunk 3: 8, then 12 each."""
    return FRAMES_PER_LATENT * (chunk - 1 if chunk_index == 0 else chunk)


def parse_keys(text: str) -> tuple[frozenset[str], ...]:
    """``w-10,iw-5,none-3`` to a set of keys a video frame: each part is keys and a number of frames."""

    def part(item: str) -> Iterable[frozenset[str]]:
        held, dash, count = item.strip().rpartition("-")
        if not dash or not count.isdecimal() or not held:
            raise ValueError(f"keys: got {item!r}, expected keys, a dash and a number of video frames, such as w-12")
        return [Keys((frozenset() if held == "none" else frozenset(held),)).frames[0]] * int(count)

    return tuple(held for item in text.split(",") for held in part(item))
