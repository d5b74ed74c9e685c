"""What ranks store of a job, as the driver sees it: keys, how far it got, and blobs to hand on.  No torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_PREFIX_BYTES = 8
"""A safetensors file begins with the length of its header, a little-endian uint64."""


def solver_state_key(job: str) -> str:
    """Where a job's latest solver state is stored."""
    return f"{job}/solver.safetensors"


def donor_key(job: str, step: int) -> str:
    """Where the latents that enter `step` are stored for other requests to start from."""
    return f"{job}/donor-{step:04d}.safetensors"


def restarted_numbers(solver_order: int) -> dict[str, Any]:
    """Plain numbers of a solver without history: its order starts again at 1."""
    return {"lower_order_nums": 0, "this_order": None, "timestep_list": [None] * solver_order}


@dataclass(frozen=True)
class SavedState:
    """What `SolverState.to_bytes` wrote."""

    step: int
    """The next step to compute; as many as the solver has when all are done."""
    numbers: Mapping[str, Any]
    """The solver's plain numbers."""
    blob: bytes
    """The whole file: safetensors with ``latents`` and ``solver.*``."""

    @classmethod
    def from_bytes(cls, data: bytes) -> SavedState:
        """A torn or foreign file raises ValueError or KeyError."""
        end = _PREFIX_BYTES + int.from_bytes(data[:_PREFIX_BYTES], "little")
        header = json.loads(data[_PREFIX_BYTES:end])
        metadata = header.pop("__metadata__")
        size = end + max(tensor["data_offsets"][1] for tensor in header.values())
        if len(data) != size or "latents" not in header:
            raise ValueError(f"solver state: {len(data)} bytes with tensors {sorted(header)}, expected {size} bytes")
        return cls(int(metadata["step"]), json.loads(metadata["numbers"]), data)
