"""What every stored record of the step cache has in common: closed, frozen, finite, hashed in one canonical form."""

from __future__ import annotations

import hashlib
import json
from typing import Annotated

from pydantic import BaseModel, ConfigDict, StringConstraints

from deployments.plan import BRANCHES, Branch

Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]


class Closed(BaseModel):
    """Unknown fields are errors, values cannot change, NaN and infinity are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @property
    def digest(self) -> str:
        """SHA-256 of the canonical JSON: equal records have equal digests however their file was formatted."""
        return digest_of(self.model_dump(mode="json"))


def digest_of(value: object) -> str:
    """SHA-256 (hex) of ``value`` as JSON with sorted keys and no spaces; floats by their shortest exact decimal."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def checked_branch(name: object) -> Branch:
    """``name`` if it is a branch, else ValueError: call parity breaks as soon as branches run on different ranks."""
    for branch in BRANCHES:
        if name == branch:
            return branch
    raise ValueError(f"branch: got {name!r}, expected one of {list(BRANCHES)}; label every stage call with its branch")
