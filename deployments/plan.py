"""The contract between the driver and a gang: what will be computed, where, and what must exist before it.

A plan is decided once, on the host, before the work starts.  Every stage and both guidance branches follow the same
list of steps, so a plan is stored as that list and its topology, and the DAG of stage calls is derived from them:

    node   (step, branch, stage, op)      one call of one stage, or the solver's update
    edge   a node that must have finished first: its output is this node's input

Ranks walk the list in the order in which rank 0 announces the steps.  `simulate` turns seconds a node into makespan and
busy share, so a topology can be judged without its GPUs.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Literal

Branch = Literal["positive", "negative"]
StepOp = Literal["full", "reuse"]
Op = Literal["full", "reuse", "solve"]

BRANCHES: tuple[Branch, Branch] = ("positive", "negative")


@dataclass(frozen=True)
class Step:
    """One solver step.  ``full`` runs the blocks, ``reuse`` predicts their residual from earlier steps."""

    index: int
    """Position in the scheduler's timesteps, 0 first."""
    op: StepOp = "full"
    expert: int = 0
    """Which transformer: 0 `transformer`, 1 `transformer_2`."""


@dataclass(frozen=True)
class Node:
    """One vertex of the DAG; `after` holds positions in `Plan.nodes`."""

    step: int
    branch: Branch
    stage: int
    op: Op
    rank: int
    after: tuple[int, ...]


@dataclass(frozen=True)
class Simulation:
    """Outcome of `Plan.simulate`, in the unit of the given times."""

    makespan: float
    busy: tuple[float, ...]
    """Share of the makespan each rank computes, 0 to 1."""


@dataclass(frozen=True)
class Plan:
    """The steps of one request on a gang of ``stages * chains`` ranks; rank = chain * stages + stage."""

    stages: int
    chains: int
    """1: all branches on one chain of stages; 2: a chain for each branch."""
    branches: tuple[Branch, ...]
    """One branch where guidance is off, then the second chain idles."""
    steps: tuple[Step, ...]

    def __post_init__(self) -> None:
        if self.stages < 1 or self.chains not in (1, 2):
            raise ValueError(f"plan: got {self.stages} stages and {self.chains} chains, expected >= 1 and 1 or 2")
        if self.branches not in (BRANCHES[:1], BRANCHES):
            raise ValueError(f"plan: got branches {self.branches}, expected {BRANCHES[:1]} or {BRANCHES}")
        indices = [step.index for step in self.steps]
        if indices != list(range(indices[0], indices[0] + len(indices)) if indices else []):
            raise ValueError(f"plan: got step indices {indices}, expected consecutive ones")

    def chain(self, branch: Branch) -> int:
        """The chain of stages a branch runs on."""
        return BRANCHES.index(branch) if self.chains == 2 else 0

    def rank(self, branch: Branch, stage: int) -> int:
        """The rank within the gang that runs a branch's stage."""
        return self.chain(branch) * self.stages + stage

    def branches_of(self, rank: int) -> tuple[Branch, ...]:
        """The branches that a rank computes, in the order it does; none where guidance is off and its chain idles."""
        return tuple(branch for branch in self.branches if self.chain(branch) == rank // self.stages)

    @property
    def solver_rank(self) -> int:
        """Last stage of the positive chain: it combines the branches and advances the latents."""
        return self.stages - 1

    @cached_property
    def nodes(self) -> tuple[Node, ...]:
        """The DAG in an order that respects its edges: by step, branch and stage, then the solver."""
        nodes: list[Node] = []
        solved: tuple[int, ...] = ()
        for step in self.steps:
            heads = []
            for branch in self.branches:
                after = solved
                for stage in range(self.stages):
                    nodes.append(Node(step.index, branch, stage, step.op, self.rank(branch, stage), after))
                    after = (len(nodes) - 1,)
                heads.append(len(nodes) - 1)
            nodes.append(Node(step.index, "positive", self.stages - 1, "solve", self.solver_rank, tuple(heads)))
            solved = (len(nodes) - 1,)
        return tuple(nodes)

    def simulate(self, seconds: Callable[[Node], float], *, hop: float = 0.0, requests: int = 1) -> Simulation:
        """Run `requests` equal requests through the gang in the order the conductor would choose.

        seconds: time of a node on its rank.  hop: time of a tensor between two ranks; ranks compute meanwhile.
        Ranks work strictly in the order of announced steps; a step is announced when rank 0 is free and its request's
        latents are there, and among several the one that has waited longest goes first.
        """
        per_step = len(self.branches) * self.stages + 1
        free = [0.0] * (self.stages * self.chains)
        work = [0.0] * len(free)
        ready = [0.0] * requests
        position = [0] * requests
        waiting = list(range(requests))
        while waiting:
            request = min(waiting, key=lambda r: (max(ready[r], free[0]), ready[r]))
            first = position[request] * per_step
            finished: dict[int, float] = {}
            for offset, node in enumerate(self.nodes[first : first + per_step], start=first):
                inputs = [
                    finished[i] + (hop if self.nodes[i].rank != node.rank else 0.0) if i in finished else ready[request]
                    for i in node.after
                ]
                start = max([free[node.rank], ready[request], *inputs])
                finished[offset] = free[node.rank] = start + seconds(node)
                work[node.rank] += seconds(node)
            ready[request] = finished[first + per_step - 1] + (hop if len(free) > 1 else 0.0)
            position[request] += 1
            waiting.remove(request)
            if position[request] < len(self.steps):
                waiting.append(request)
        makespan = max(free, default=0.0)
        return Simulation(makespan, tuple(w / makespan if makespan else 0.0 for w in work))

    def to_json(self) -> dict[str, Any]:
        """Plain data; `from_json` is the inverse."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Plan:
        """Rebuild a plan; wrong data raises ValueError, KeyError or TypeError."""
        return cls(
            stages=data["stages"],
            chains=data["chains"],
            branches=tuple(data["branches"]),
            steps=tuple(Step(**step) for step in data["steps"]),
        )

    @cached_property
    def digest(self) -> int:
        """63-bit digest of the plan; it travels with every announced step, so that ranks notice a mix-up."""
        canonical = json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"))
        return int.from_bytes(hashlib.sha256(canonical.encode()).digest()[:8]) >> 1

    def describe(self) -> dict[str, Any]:
        """What `GET /v1/videos/{id}/plan` shows: the steps, the digest and the DAG."""
        return {**self.to_json(), "digest": f"{self.digest:016x}", "nodes": [asdict(node) for node in self.nodes]}
