"""What ranks of a gang tell each other: tensors on the way, and rarely a note to rank 0.

Sends never wait; receives do.  Both ends of a tensor know its shape and dtype beforehand, so nothing but its bytes
travels.  Order holds per direction: what one rank sends another in one lane arrives in the order it was sent.
A tensor that is on its way is kept alive until its request is settled: by then it has been received, for what came
back depended on it.  (gloo could not tell earlier: its `Work.is_completed` stays false until `wait`.)

NCCL executes the operations of one communicator in order, and a send waits there for its receiver.  Hidden states, the
predictions of the second chain and the latents that come back therefore use a lane (a process group) each: in one lane
two ranks that send to each other would wait for ever.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

Lane = Literal["hidden", "prediction", "latents"]
LANES: tuple[Lane, ...] = ("hidden", "prediction", "latents")
Backend = Literal["gloo", "nccl", "staged"]


class Transport(Protocol):
    """What a worker needs of its neighbours.  `request` is the number rank 0 gave a request."""

    def send(self, tensor: Tensor, to: int, lane: Lane, request: int) -> None:
        """Queue a tensor for rank `to`; it must not be written afterwards."""

    def recv(self, shape: Sequence[int], dtype: torch.dtype, source: int, lane: Lane) -> Tensor:
        """The next tensor of `source` in this lane, on the worker's device."""

    def settle(self, request: int) -> None:
        """Let go of what was sent for a request, all of which has been received."""

    def post(self, request: int, topic: str, note: dict[str, Any]) -> None:
        """Leave a note for rank 0."""

    def peek(self, request: int, topic: str) -> dict[str, Any] | None:
        """Rank 0: a note of any other rank, None while there is none.  Does not wait."""

    def gather(self, request: int, topic: str) -> list[dict[str, Any]]:
        """Rank 0: the notes of ranks 1.., each of which posts one; waits for them and removes them."""


class Alone:
    """The transport of a gang of one rank: nobody to talk to, no process group."""

    def send(self, tensor: Tensor, to: int, lane: Lane, request: int) -> None:
        """Never called: a plan for one rank has no edge between ranks."""
        raise RuntimeError(f"a gang of one rank was asked to send to rank {to} in lane {lane}")

    def recv(self, shape: Sequence[int], dtype: torch.dtype, source: int, lane: Lane) -> Tensor:
        """Never called, as `send`."""
        raise RuntimeError(f"a gang of one rank was asked to receive from rank {source} in lane {lane}")

    def settle(self, request: int) -> None:
        """Nothing is on its way."""

    def post(self, request: int, topic: str, note: dict[str, Any]) -> None:
        """Never called: rank 0 keeps its own."""
        raise RuntimeError(f"a gang of one rank was asked to post {topic}")

    def peek(self, request: int, topic: str) -> dict[str, Any] | None:
        """No other rank, no note."""
        return None

    def gather(self, request: int, topic: str) -> list[dict[str, Any]]:
        """No other rank, no notes."""
        return []


class GroupTransport:
    """`torch.distributed` groups, one a lane; notes go through the store at which the gang met.

    backend: ``gloo`` between CPUs, ``nccl`` with a GPU for each rank, ``staged`` where ranks share a GPU: through host
    memory over gloo, for correctness rather than speed.
    timeout_s: longest wait for a peer; afterwards the operation raises and the gang is finished.
    """

    def __init__(self, backend: Backend, device: torch.device, store: dist.Store, timeout_s: float) -> None:
        self._device, self._staged = device, backend == "staged"
        self._timeout = timedelta(seconds=timeout_s)
        name = "nccl" if backend == "nccl" else "gloo"
        self._groups = {lane: dist.new_group(backend=name, timeout=self._timeout) for lane in LANES}
        self._store = dist.PrefixStore("notes", store)
        self._sent: defaultdict[int, list[tuple[dist.Work, Tensor]]] = defaultdict(list)

    def send(self, tensor: Tensor, to: int, lane: Lane, request: int) -> None:
        """Queue a tensor for rank `to`."""
        payload = tensor.contiguous()
        if self._staged:
            payload = payload.cpu()
        work = dist.isend(payload, group=self._groups[lane], group_dst=to)
        assert work is not None  # None is for ranks outside the group
        self._sent[request].append((work, payload))

    def recv(self, shape: Sequence[int], dtype: torch.dtype, source: int, lane: Lane) -> Tensor:
        """Wait for the next tensor of `source`; on NCCL the device waits, not the host."""
        place = torch.device("cpu") if self._staged else self._device
        out = torch.empty(tuple(shape), dtype=dtype, device=place)
        work = dist.irecv(out, group=self._groups[lane], group_src=source)
        assert work is not None
        work.wait()
        return out.to(self._device) if self._staged else out

    def settle(self, request: int) -> None:
        """Let go of what was sent for a request; the waits return at once."""
        for work, _ in self._sent.pop(request, ()):
            work.wait()

    def post(self, request: int, topic: str, note: dict[str, Any]) -> None:
        """Leave a note for rank 0."""
        self._store.set(self._key(request, topic, dist.get_rank()), json.dumps(note))

    def peek(self, request: int, topic: str) -> dict[str, Any] | None:
        """Rank 0: a note of any other rank, None while there is none."""
        for rank in range(1, dist.get_world_size()):
            if self._store.check([self._key(request, topic, rank)]):
                return self._read(request, topic, rank)
        return None

    def gather(self, request: int, topic: str) -> list[dict[str, Any]]:
        """Rank 0: one note of each other rank, in their order."""
        return [self._read(request, topic, rank) for rank in range(1, dist.get_world_size())]

    def _read(self, request: int, topic: str, rank: int) -> dict[str, Any]:
        key = self._key(request, topic, rank)
        self._store.wait([key], self._timeout)
        note: dict[str, Any] = json.loads(self._store.get(key))
        self._store.delete_key(key)
        return note

    @staticmethod
    def _key(request: int, topic: str, rank: int) -> str:
        return f"{request}/{topic}/{rank}"
