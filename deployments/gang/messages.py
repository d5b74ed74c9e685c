"""What rank 0 tells the other ranks of its gang, in the one order that all of them follow.

    Open    a request begins: its plan, its parameters and its small tensors (prompt embeddings, a saved solver state)
    Run     the request's next step, with the digest of the plan; native once its step cache is vetoed
    Close   the request has ended, whatever the reason: drop its state
    Stop    the gang shuts down

A message is a header of four int64 (kind, request, argument, payload bytes), then the payload where there is one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor


class _Kind(IntEnum):
    OPEN = 1
    RUN = 2
    CLOSE = 3
    STOP = 4
    RUN_NATIVE = 5


HEADER_FIELDS = 4


@dataclass(frozen=True)
class Open:
    """A request begins."""

    request: int
    """Number given by rank 0, never used twice in a gang."""
    spec: Mapping[str, Any]
    """Plain data; the worker knows its fields."""
    tensors: Mapping[str, Tensor]
    """On the CPU."""


@dataclass(frozen=True)
class Run:
    """The next step of an open request."""

    request: int
    position: int
    """Position in the plan's steps."""
    digest: int
    """`Plan.digest` as rank 0 has it."""
    native: bool = False
    """The step cache must not be used from this step on, whatever the plan says."""


@dataclass(frozen=True)
class Close:
    """A request has ended."""

    request: int


@dataclass(frozen=True)
class Stop:
    """The gang shuts down."""


Message = Open | Run | Close | Stop


def encode(message: Message) -> tuple[Tensor, Tensor | None]:
    """Header [4] int64 and payload [n] uint8, or None without one; both on the CPU."""
    match message:
        case Open(request, spec, tensors):
            text = json.dumps(spec).encode()
            data = text + save(dict(tensors))
            payload = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            return torch.tensor([_Kind.OPEN, request, len(text), len(data)]), payload
        case Run(request, position, digest, native):
            # The digest rides in the payload field: a Run has no payload.
            return torch.tensor([_Kind.RUN_NATIVE if native else _Kind.RUN, request, position, digest]), None
        case Close(request):
            return torch.tensor([_Kind.CLOSE, request, 0, 0]), None
        case Stop():
            return torch.tensor([_Kind.STOP, 0, 0, 0]), None


def payload_bytes(header: Tensor) -> int:
    """Bytes that follow a header."""
    kind, _, _, size = header.tolist()
    return size if kind == _Kind.OPEN else 0


def decode(header: Tensor, payload: Tensor | None) -> Message:
    """Inverse of `encode`; an unknown kind raises ValueError."""
    kind, request, argument, last = header.tolist()
    match kind:
        case _Kind.OPEN:
            assert payload is not None
            data = payload.numpy().tobytes()
            return Open(request, json.loads(data[:argument]), load(data[argument:]))
        case _Kind.RUN | _Kind.RUN_NATIVE:
            return Run(request, argument, last, kind == _Kind.RUN_NATIVE)
        case _Kind.CLOSE:
            return Close(request)
        case _Kind.STOP:
            return Stop()
    raise ValueError(f"message kind: got {kind}, expected one of {[k.value for k in _Kind]}")
