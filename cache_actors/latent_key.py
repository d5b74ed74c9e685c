"""What two video requests must share for one to reuse the other's work.

Invariant: equal keys mean equal computation.  A key is a SHA-256 over length-prefixed fields with a schema version, so
no two different field lists run together; a field without a value is an error, never a shorter key; a request's field
that is neither keyed nor listed as irrelevant is an error too, so that a new option cannot be forgotten here.

    partition    everything but prompt and seed             level 2 looks for similar prompts inside one
    trajectory   partition + prompt + seed + numerics       level 1: the same latents, bit for bit
    request      partition + prompt + seed + decoding       level 0: the same files
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from pydantic import Field

from cache_actors.closed import Closed, Sha256

KEY_SCHEMA = 1
"""Part of every key: raise it when a key's meaning changes."""

IRRELEVANT = {
    "model": "a name; the weights' hash is keyed instead",
    "latent_cache": "whether the cache may answer, not what is computed",
    "seed_given": "whether the seed was sent or drawn; its value is keyed",
    "seed_policy": "whether a donor's seed will do, not what is computed",
    "step_cache": "a wish; the steps really reused are keyed as reused_steps, their predictor as step_profile",
}
"""Request fields that no key holds, and why."""

_PARTITION = (
    "tenant",
    "weights",
    "task",
    "conditioning",
    "width",
    "height",
    "num_frames",
    "latent_shape",
    "num_inference_steps",
    "scheduler",
    "scheduler_config",
    "flow_shift",
    "timesteps",
    "sigmas",
    "guidance_scale",
    "guidance_scale_2",
    "boundary_ratio",
    "negative_prompt",
    "max_sequence_length",
    "loras",
    "dtype",
    "quantization",
    "latent_dtype",
    "step_profile",
    "reused_steps",
)
_TRAJECTORY = (*_PARTITION, "prompt", "seed", "numerics")
_REQUEST = (*_PARTITION, "prompt", "seed", "decoder", "fps", "outputs")


class UnkeyedField(ValueError):
    """A request has a field that the latent cache does not know."""

    def __init__(self, names: Iterable[str]) -> None:
        self.names = sorted(names)
        super().__init__(
            f"request fields {self.names} are unknown to the latent cache: add each to a key in "
            "cache_actors/latent_key.py, or to IRRELEVANT if it changes no pixel"
        )


class Lora(Closed):
    """One adapter in effect."""

    weights: Sha256
    scale: float
    expert: str


class ServedModel(Closed):
    """What is the same for every request of one served model.  No field has a default: none may be forgotten."""

    weights: Sha256 = Field(description="Of every file that decides what the model computes.")
    task: str
    scheduler: str = Field(description="Class name.")
    scheduler_config: Sha256 = Field(description="Of the canonical scheduler_config.json: order, type, predictions.")
    boundary_ratio: float | None
    loras: tuple[Lora, ...] = Field(description="Sorted by weights; none is a value.")
    dtype: str
    quantization: str | None
    latent_dtype: str
    step_profile: str | None = Field(description="Digest of the step cache's profile: a donor carries its error.")
    decoder: str = Field(description="Digest of the decoder's dtype, codec and quality.")
    numerics: str = Field(description="Digest of GPU type, torch, CUDA, attention, compile mode and topology.")


class LatentIdentity(ServedModel):
    """One request in full: the only source of keys."""

    tenant: str = Field(min_length=1)
    conditioning: Sha256 | None = Field(description="Of the conditioning image; None for text to video.")
    width: int
    height: int
    num_frames: int
    latent_shape: tuple[int, ...]
    num_inference_steps: int = Field(ge=1)
    flow_shift: float
    timesteps: tuple[float, ...] = Field(description="The scheduler's own, as numbers.")
    sigmas: tuple[float, ...]
    guidance_scale: float
    guidance_scale_2: float | None
    negative_prompt: str = Field(description="Cleaned.")
    max_sequence_length: int
    prompt: str = Field(description="Cleaned.")
    seed: int
    reused_steps: tuple[int, ...] = Field(description="Steps that the uninterrupted plan reuses; none is a value.")
    fps: int
    outputs: tuple[str, ...]

    @classmethod
    def of(
        cls,
        params: Mapping[str, Any],
        served: ServedModel,
        *,
        tenant: str,
        latent_shape: tuple[int, ...],
        timesteps: tuple[float, ...],
        sigmas: tuple[float, ...],
        reused_steps: tuple[int, ...],
        clean: Callable[[str], str],
        conditioning: str | None = None,
    ) -> LatentIdentity:
        """params: every effective value of the request by name.  clean: the text encoder's own prompt cleaning.

        Raises UnkeyedField; pydantic's ValidationError for a missing or wrong value.
        """
        unknown = set(params) - set(cls.model_fields) - set(IRRELEVANT)
        if unknown:
            raise UnkeyedField(unknown)
        fields = {name: value for name, value in params.items() if name not in IRRELEVANT}
        if not reused_steps:
            fields["step_profile"] = None  # a profile that reuses nothing computes what no profile does
        fields |= {name: clean(fields[name]) for name in ("prompt", "negative_prompt") if name in fields}
        return cls(
            **{**served.model_dump(), **fields},
            tenant=tenant,
            latent_shape=latent_shape,
            timesteps=timesteps,
            sigmas=sigmas,
            reused_steps=reused_steps,
            conditioning=conditioning,
        )

    def partition(self) -> str:
        """Requests that may share latents when their prompts are similar."""
        return canonical_sha256("partition", self._fields(_PARTITION))

    def trajectory(self) -> str:
        """Requests whose latents are bit-equal at every step."""
        return canonical_sha256("trajectory", self._fields(_TRAJECTORY))

    def request(self) -> str:
        """Requests with the same files as their answer."""
        return canonical_sha256("request", self._fields(_REQUEST))

    def partition_fields(self) -> dict[str, str]:
        """A short digest of each partition field: enough to say which differ, without their contents."""
        return {name: canonical_sha256(name, {name: value})[:12] for name, value in self._fields(_PARTITION).items()}

    def _fields(self, names: Iterable[str]) -> dict[str, Any]:
        values = self.model_dump()
        return {name: values[name] for name in names}


def canonical_sha256(domain: str, fields: Mapping[str, Any]) -> str:
    """SHA-256 (hex) of named values, in name order, under a domain.

    Values: None, bool, int, float (finite), str, bytes, and tuples, lists and str-keyed mappings of them.  Types are
    part of the key: 5 and 5.0 differ, as do "" and None.  Raises TypeError or ValueError for anything else.
    """
    return hashlib.sha256(_encode([KEY_SCHEMA, domain, dict(fields)])).hexdigest()


def _encode(value: Any) -> bytes:
    match value:
        case None:
            return _part(b"n", b"")
        case bool():  # before int, of which it is one
            return _part(b"b", bytes([value]))
        case int():
            return _part(b"i", str(value).encode())
        case float():
            if value - value != 0:
                raise ValueError(f"key: got {value}, expected a finite number")
            return _part(b"f", struct.pack(">d", value + 0.0))  # -0.0 + 0.0 is 0.0
        case str():
            return _part(b"s", value.encode())
        case bytes():
            return _part(b"y", value)
        case list() | tuple():
            return _part(b"l", b"".join(map(_encode, value)))
        case dict():
            return _part(b"d", b"".join(_encode(name) + _encode(value[name]) for name in sorted(value)))
    raise TypeError(
        f"key: got a {type(value).__name__}, expected None, bool, int, float, str, bytes or a container of them"
    )


def _part(kind: bytes, content: bytes) -> bytes:
    return kind + struct.pack(">Q", len(content)) + content
