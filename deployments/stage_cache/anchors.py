"""The residuals a stage keeps for later predictions, by request and branch, within a budget.

Invariant: a residual is read only by the request and branch that stored it, and only at the step it was stored for.
A request reserves all it may ever hold before its first step, so memory runs out at admission or not at all.
The bytes of one residual: tokens x D x element size; 15.7 MB at 512x512x17 and 101 MB at 832x480x81 (D 1536, bf16).

Used by the rank's one device thread; the byte counts may be read from others.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from deployments.plan import Branch
from deployments.stage_cache.native_reason import NativeReason


class AnchorError(RuntimeError):
    """A residual was stored or asked for out of turn: a fault of the caller, never answered with another residual."""


@dataclass
class _Request:
    reserved: int
    residuals: dict[Branch, dict[int, Tensor]] = field(default_factory=dict)
    """By branch and step, oldest first."""


class AnchorStore:
    """budget_bytes: most that all requests together may reserve on this rank; 0 admits none."""

    def __init__(self, budget_bytes: int) -> None:
        if budget_bytes < 0:
            raise ValueError(f"budget_bytes: got {budget_bytes}, expected at least 0")
        self.budget_bytes = budget_bytes
        self._requests: dict[int, _Request] = {}

    @property
    def reserved_bytes(self) -> int:
        """Sum of the reservations of the requests in flight."""
        return sum(request.reserved for request in self._requests.values())

    @property
    def held_bytes(self) -> int:
        """Bytes of the residuals held now; never above `reserved_bytes`."""
        return sum(
            residual.nbytes
            for request in self._requests.values()
            for kept in request.residuals.values()
            for residual in kept.values()
        )

    def reserve(self, request: int, nbytes: int) -> NativeReason | None:
        """Admit a request that will hold at most ``nbytes``, or say why it has to run native."""
        if request in self._requests:
            raise AnchorError(f"request {request}: already admitted; drop it before its id is used again")
        free = self.budget_bytes - self.reserved_bytes
        if nbytes > free:
            return NativeReason(
                "memory",
                f"the step cache needs {nbytes} bytes on this rank, {free} of {self.budget_bytes} are free; "
                "raise its budget or send fewer requests at once",
            )
        self._requests[request] = _Request(nbytes)
        return None

    def keep(self, request: int, branch: Branch, step: int, residual: Tensor, count: int) -> None:
        """Store the residual of a full step and drop all but the newest ``count`` of its branch."""
        state = self._admitted(request)
        kept = state.residuals.setdefault(branch, {})
        if kept and step <= next(reversed(kept)):
            raise AnchorError(f"request {request}, {branch}: step {step} after step {next(reversed(kept))}")
        while len(kept) >= count:
            del kept[next(iter(kept))]
        held = sum(other.nbytes for side in state.residuals.values() for other in side.values())
        if held + residual.nbytes > state.reserved:
            raise AnchorError(
                f"request {request}: would hold {held + residual.nbytes} bytes, reserved are {state.reserved}"
            )
        kept[step] = residual

    def get(self, request: int, branch: Branch, steps: tuple[int, ...]) -> tuple[Tensor, ...]:
        """The residuals of exactly these steps, in this order; AnchorError if one is not held."""
        kept = self._admitted(request).residuals.get(branch, {})
        missing = [step for step in steps if step not in kept]
        if missing:
            raise AnchorError(f"request {request}, {branch}: no residual of steps {missing}, held are {sorted(kept)}")
        return tuple(kept[step] for step in steps)

    def drop(self, request: int) -> None:
        """Free what a request holds, at its end, failure or cancel.  Unknown ids (native requests) are no error."""
        self._requests.pop(request, None)

    def _admitted(self, request: int) -> _Request:
        state = self._requests.get(request)
        if state is None:
            raise AnchorError(f"request {request}: not admitted; reserve its bytes before its first step")
        return state
