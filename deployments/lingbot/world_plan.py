"""What will be computed for a world, where, and what must exist before it; the counterpart of `deployments.plan`.

A plan is a list of passes, each of which every stage takes part in; the DAG of stage calls is derived from it:

    restore   each stage puts its window where it was after `chunk` chunks          no edges between stages
    denoise   latents ──> stage 0 ──> ... ──> last stage ──> solve (x0, new noise)  one of a chunk's denoise steps
    clean     latents ──> stage 0 ──> ... ──> last stage                            writes the chunk's keys and values

A generated chunk is its denoise passes and a clean pass; a replayed one the clean pass alone.  Chunks that a cache knew
are in no pass: `fast_forward` counts them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Literal

PassOp = Literal["restore", "denoise", "clean"]
Op = Literal["restore", "denoise", "solve", "clean"]


@dataclass(frozen=True)
class Pass:
    """One walk through the stages."""

    op: PassOp
    chunk: int
    """The chunk that is computed, 0 first; of a restore the number of chunks in the window."""
    step: int = 0
    """Of a denoise pass: position in the sampler's timesteps."""


@dataclass(frozen=True)
class Node:
    """One vertex of the DAG; `after` holds positions in `WorldPlan.nodes`."""

    op: Op
    chunk: int
    step: int
    stage: int
    """Also the rank: a world has one branch."""
    after: tuple[int, ...]


@dataclass(frozen=True)
class WorldPlan:
    """The passes of one request on a chain of stages."""

    stages: int
    passes: tuple[Pass, ...]
    fast_forward: int
    """Chunks that this request took from a cache instead of denoising them."""

    def __post_init__(self) -> None:
        if self.stages < 1 or self.fast_forward < 0:
            raise ValueError(
                f"plan: got {self.stages} stages and {self.fast_forward} known chunks, expected >= 1 and >= 0"
            )
        at: int | None = None
        for position, one in enumerate(self.passes):
            if one.op == "restore":
                legal, at = position == 0, one.chunk
            else:
                legal = at is None or one.chunk == at
                at = one.chunk + (one.op == "clean")
            if not legal:
                raise ValueError(
                    f"plan: got {one.op} of chunk {one.chunk} at position {position}: a restore comes first, and "
                    "chunks follow one another, each ended by its clean pass"
                )

    @cached_property
    def nodes(self) -> tuple[Node, ...]:
        """The DAG in an order that respects its edges: pass by pass, stage by stage."""
        nodes: list[Node] = []
        last_of: dict[int, int] = {}
        solved: dict[int, int] = {}  # by chunk: the node that gave its latents of the moment

        def add(op: Op, one: Pass, stage: int, *after: int) -> int:
            own = last_of.get(stage)
            before = {*after} if own is None else {*after, own}
            nodes.append(Node(op, one.chunk, one.step, stage, tuple(sorted(before))))
            last_of[stage] = len(nodes) - 1
            return last_of[stage]

        for one in self.passes:
            after = [solved[one.chunk]] if one.op != "restore" and one.chunk in solved else []
            for stage in range(self.stages):
                made = add(one.op, one, stage, *after)
                after = [] if one.op == "restore" else [made]
            if one.op == "denoise":
                solved[one.chunk] = add("solve", one, self.stages - 1, *after)
        return tuple(nodes)

    def simulate(self, seconds: Callable[[Node], float], *, hop: float = 0.0) -> float:
        """Makespan of the plan alone on its gang, in the unit of the given times.  hop: a tensor between two ranks."""
        finished: list[float] = []
        for node in self.nodes:
            inputs = [finished[i] + (hop if self.nodes[i].stage != node.stage else 0.0) for i in node.after]
            finished.append(max(inputs, default=0.0) + seconds(node))
        return max(finished, default=0.0)

    def to_json(self) -> dict[str, Any]:
        """Plain data; `from_json` is the inverse."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> WorldPlan:
        """Rebuild a plan; wrong data raises ValueError, KeyError or TypeError."""
        return cls(data["stages"], tuple(Pass(**one) for one in data["passes"]), data["fast_forward"])

    @cached_property
    def digest(self) -> int:
        """63-bit digest of the plan; it travels with every announced pass, so that ranks notice a mix-up."""
        canonical = json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"))
        return int.from_bytes(hashlib.sha256(canonical.encode()).digest()[:8]) >> 1

    def describe(self) -> dict[str, Any]:
        """The passes, the digest and the DAG as plain data."""
        return {**self.to_json(), "digest": f"{self.digest:016x}", "nodes": [asdict(node) for node in self.nodes]}
