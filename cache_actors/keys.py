"""Names of worlds and of their chunks, such that a value is a pure function of its name.

    root = H("root", everything that decides the world's pixels but the controls)
    node = H("node", parent, the chunk's canonical controls)

What is not in the root: how long the world gets, the session's id, the number of pipeline stages (blocks are cut, not
changed).  A root is stored with its material, which is compared on a hit: equal digests are not taken on trust.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict, dataclass, fields
from typing import Any

Key = bytes
"""A whole SHA-256 digest, 32 bytes."""

KEY_BYTES = 32


@dataclass(frozen=True)
class WorldMaterial:
    """All that a root key covers.  Every field is required: what is left out would be shared wrongly.

    Floats are compared by value and digit; fp32 sigmas are given as fp32 values.
    """

    transformer: str
    """Fingerprint (hex) of the transformer's files; so for the next two."""
    vae: str
    text_encoder: str
    adapters: tuple[str, ...]
    """Fingerprints of merged adapters in order; none: ()."""
    quantization: str
    """``none``, or scheme and version."""

    timesteps: tuple[int, ...]
    sigma_x0: tuple[float, ...]
    sigma_noise: tuple[float, ...]
    clean_pass: bool
    """Whether keys and values are written by a pass over the clean latents."""

    chunk: int
    window: int
    sink: int
    """Latent frames."""
    height: int
    width: int
    """Pixels, after the resize."""

    weight_dtype: str
    residual_dtype: str
    kv_dtype: str
    vae_dtype: str
    attention: str
    """Backend of attention."""
    compiled: bool
    """Eager and compiled blocks differ in their last bits."""
    sequence_parallel: int
    tensor_parallel: int
    device: str
    """Kind of device, such as a GPU's product name."""
    software: str
    """Versions of torch and of its kernels."""

    image: str
    """SHA-256 (hex) of the decoded RGB pixels with their size (`image_digest`)."""
    resize: str
    """Rule by which the image gets the world's size."""
    prompt: str
    """Cleaned."""
    max_prompt_tokens: int

    seed: int
    noise_version: int

    camera_version: int
    controls_version: int
    move_step: float
    turn_step: float
    pitch_limit: float
    translation_scale: float
    intrinsics: tuple[float, float, float, float]

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            for number in value if isinstance(value, tuple) else (value,):
                if isinstance(number, float) and (not math.isfinite(number) or (number == 0 and str(number) == "-0.0")):
                    raise ValueError(f"{field.name}: got {number}, expected a finite number that is not -0.0")

    def canonical(self) -> bytes:
        """The bytes that the root key digests; `from_canonical` is the inverse."""
        text = json.dumps(asdict(self), sort_keys=True, separators=(",", ":"), allow_nan=False, ensure_ascii=True)
        return text.encode()

    @classmethod
    def from_canonical(cls, data: bytes) -> WorldMaterial:
        """Raises TypeError for bytes with other fields."""
        content = {name: tuple(v) if isinstance(v, list) else v for name, v in json.loads(data).items()}
        arguments: dict[str, Any] = content
        return cls(**arguments)


def world_root(material: WorldMaterial) -> Key:
    """The key of a world before its first chunk."""
    return _digest(b"root", material.canonical())


def node_key(parent: Key, action: bytes) -> Key:
    """The key of the chunk that `action` (canonical controls) makes after `parent`, a root or a node."""
    if len(parent) != KEY_BYTES:
        raise ValueError(f"parent: got {len(parent)} bytes, expected a whole digest of {KEY_BYTES}")
    return _digest(b"node", parent, action)


def path_keys(root: Key, actions: list[bytes]) -> list[Key]:
    """The keys of consecutive chunks."""
    keys, parent = [], root
    for action in actions:
        parent = node_key(parent, action)
        keys.append(parent)
    return keys


def image_digest(pixels: bytes, height: int, width: int) -> str:
    """Of decoded RGB pixels, row by row; hex.  Not of a file: two files of one picture are one world."""
    if len(pixels) != 3 * height * width:
        raise ValueError(
            f"image: got {len(pixels)} bytes for {height}x{width} RGB pixels, expected {3 * height * width}"
        )
    return _digest(b"image", b"RGB", f"{height}x{width}".encode(), pixels).hex()


def _digest(*parts: bytes) -> bytes:
    """SHA-256 of length-prefixed parts: ("ab", "c") and ("a", "bc") differ."""
    out = hashlib.sha256()
    for part in parts:
        out.update(len(part).to_bytes(8, "little"))
        out.update(part)
    return out.digest()
