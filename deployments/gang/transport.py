"""Tensors from rank to rank, inside one gang.

Sends never wait; receives do.  Both ends of a tensor know its shape and dtype beforehand, so nothing but its bytes
travels.  Order holds per direction: what one rank sends another in one lane arrives in the order it was sent.

NCCL executes the operations of one communicator in order, and a send waits there for its receiver.  Hidden states, the
predictions of the second chain and the latents that come back therefore use a lane (a process group) each: in one lane two
ranks that send to each other would wait for ever.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

Lane = Literal["hidden", "prediction", "latents"]
LANES: tuple[Lane, ...] = ("hidden", "prediction", "latents")
Backend = Literal["gloo", "nccl", "staged"]


class Transport(Protocol):
    """What a worker needs of its neighbours."""

    def send(self, tensor: Tensor, to: int, lane: Lane) -> None:
        """Queue a tensor for rank `to`; it must not be written afterwards."""

    def recv(self, shape: Sequence[int], dtype: torch.dtype, source: int, lane: Lane) -> Tensor:
        """The next tensor of `source` in this lane, on the worker's device."""


class Alone:
    """The transport of a gang of one rank: nobody to talk to, no process group."""

    def send(self, tensor: Tensor, to: int, lane: Lane) -> None:
        """Never called: a plan for one rank has no edge between ranks."""
        raise RuntimeError(f"a gang of one rank was asked to send to rank {to} in lane {lane}")

    def recv(self, shape: Sequence[int], dtype: torch.dtype, source: int, lane: Lane) -> Tensor:
        """Never called, as `send`."""
        raise RuntimeError(f"a gang of one rank was asked to receive from rank {source} in lane {lane}")


class GroupTransport:
    """`torch.distributed` groups, one a lane.

    backend: ``gloo`` between CPUs, ``nccl`` with a GPU for each rank, ``staged`` where ranks share a GPU: through host
    memory over gloo, for correctness rather than speed.
    timeout_s: longest wait for a peer; afterwards the operation raises and the gang is finished.
    """

    def __init__(self, backend: Backend, device: torch.device, timeout_s: float) -> None:
        self._device, self._staged = device, backend == "staged"
        name = "nccl" if backend == "nccl" else "gloo"
        timeout = timedelta(seconds=timeout_s)
        self._groups = {lane: dist.new_group(backend=name, timeout=timeout) for lane in LANES}
        self._sending: deque[tuple[dist.Work, Tensor]] = deque()

    def send(self, tensor: Tensor, to: int, lane: Lane) -> None:
        """Queue a tensor for rank `to`; it is kept alive until it is gone."""
        while self._sending and self._sending[0][0].is_completed():
            self._sending.popleft()[0].wait()
        payload = tensor.contiguous()
        if self._staged:
            payload = payload.cpu()
        work = dist.isend(payload, group=self._groups[lane], group_dst=to)
        self._sending.append((work, payload))

    def recv(self, shape: Sequence[int], dtype: torch.dtype, source: int, lane: Lane) -> Tensor:
        """Wait for the next tensor of `source`; on NCCL the device waits, not the host."""
        place = torch.device("cpu") if self._staged else self._device
        out = torch.empty(tuple(shape), dtype=dtype, device=place)
        work = dist.irecv(out, group=self._groups[lane], group_src=source)
        work.wait()
        return out.to(self._device) if self._staged else out
