"""One request for a world as a gang sees it: what rank 0 is given and passes on to every rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from deployments.lingbot.camera_path import CameraState
from deployments.lingbot.world_plan import WorldPlan


@dataclass(frozen=True)
class ChunkTask:
    """One chunk that a pass of the plan computes."""

    controls: str
    """Canonical controls (ASCII)."""
    prompt: int
    """Position of the prompt in force, this chunk's own change included, in `WorldTask.prompts`."""


@dataclass(frozen=True)
class WorldTask:
    """Everything but tensors.

    The tensors that go with it: ``condition`` [4 + C, 31, h, w]; ``text.<i>`` [n, text_dim] for each of `prompts`;
    ``latents.<chunk>`` [1, C, c, h, w] fp32 for each chunk that is replayed.  What the gang keeps with the window of
    condition and embeddings (`WorldWorker.prompts`) may be left out.
    """

    world: str
    """The session's id."""
    plan: WorldPlan
    seed: int
    height: int
    width: int
    """Pixels."""
    live: int
    """Chunks in the gang's window from which the plan goes on; 0: from nothing."""
    keys: tuple[str, ...]
    """Node keys (hex) of the world's chunks, up to the last that is computed."""
    first: int
    """The first chunk of `chunks`."""
    chunks: tuple[ChunkTask, ...]
    """Consecutive: all that the plan's passes compute."""
    camera: CameraState
    """Before the first of them."""
    prompts: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain data; `from_json` is the inverse."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> WorldTask:
        """Rebuild a task from `to_json`, also after a trip through JSON."""
        return cls(
            **{
                **data,
                "plan": WorldPlan.from_json(data["plan"]),
                "keys": tuple(data["keys"]),
                "chunks": tuple(ChunkTask(**chunk) for chunk in data["chunks"]),
                "camera": CameraState(tuple(data["camera"]["pose"]), data["camera"]["pitch"]),
                "prompts": tuple(data["prompts"]),
            }
        )
