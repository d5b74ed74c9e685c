"""One process of a gang, without Ray: its device thread, its process groups, its end.

All device work and all `torch.distributed` calls of a process happen on one thread: torch keeps streams, inference mode
and thread counts per thread, and two threads in one group would mix up its order.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist

from deployments.gang.conductor import Conductor, Worker, follow
from deployments.gang.control import ControlChannel, Silent
from deployments.gang.transport import Alone, Backend, GroupTransport, Transport

JOIN_TIMEOUT_S = 600.0
"""Longest wait for all ranks of a gang to meet: they load tens of gigabytes at their own pace."""


class ClosableWorker(Worker, Protocol):
    """A worker that has something to finish when its rank ends."""

    def shutdown(self) -> None:
        """Called once, on the device thread, after the last request."""


class RankSpec(Protocol):
    """What a rank is made from; picklable."""

    @property
    def backend(self) -> Backend:
        """How tensors travel between ranks."""

    @property
    def data_timeout_s(self) -> float:
        """Longest wait for a peer's tensor."""

    @property
    def in_flight(self) -> int:
        """Requests interleaved."""

    @property
    def threads(self) -> int | None:
        """Torch threads on a CPU; None leaves torch's choice."""

    def device(self, rank: int) -> torch.device:
        """The device of a rank in this process."""

    def worker(self, rank: int, device: torch.device, transport: Transport) -> ClosableWorker:
        """Load the rank's share of the model."""


class Rank:
    """Starts the device thread at once; `wait_ready` returns when the whole gang has loaded and met.

    store: where the gang meets, None for a gang of one.
    """

    def __init__(self, spec: RankSpec, rank: int, world_size: int, store: dist.Store | None) -> None:
        self._spec, self._rank, self._world_size, self._store = spec, rank, world_size, store
        self._ready: Future[None] = Future()
        self._conductor: Conductor | None = None
        self._worker: ClosableWorker | None = None
        self.failure: BaseException | None = None
        """What ended the device thread, None while it lives or after an orderly stop."""
        self._thread = threading.Thread(target=self._main, name=f"rank-{rank}", daemon=True)
        self._thread.start()

    @property
    def conductor(self) -> Conductor:
        """Rank 0's conductor, once ready."""
        if self._conductor is None:
            raise RuntimeError(f"rank {self._rank} takes no requests; rank 0 of the gang does")
        return self._conductor

    @property
    def worker(self) -> ClosableWorker:
        """The rank's worker, once ready; only what it allows from any thread may be asked of it."""
        if self._worker is None:
            raise RuntimeError(f"rank {self._rank} has not loaded its share of the model yet")
        return self._worker

    @property
    def alive(self) -> bool:
        """Whether the device thread runs."""
        return self._thread.is_alive()

    def wait_ready(self) -> None:
        """Block until the gang can take work; raises what kept it from loading."""
        self._ready.result()

    def join(self) -> None:
        """Block until the device thread has ended."""
        self._thread.join()

    def stop(self, timeout_s: float) -> None:
        """Orderly end: rank 0 tells the others.  Returns when the thread has ended or after the timeout."""
        if self._conductor is not None:
            self._conductor.stop()
        self._thread.join(timeout_s)

    def _main(self) -> None:
        try:
            self._run()
        except BaseException as error:  # noqa: BLE001  the thread's last act: whoever asks for its health hears of it
            self.failure = error
            if not self._ready.done():
                self._ready.set_exception(error)

    def _run(self) -> None:
        spec, device = self._spec, self._spec.device(self._rank)
        if spec.threads is not None:
            torch.set_num_threads(spec.threads)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        if self._store is None:
            worker = self._worker = spec.worker(self._rank, device, Alone())
            self._conductor = conductor = Conductor(worker, Silent(), spec.in_flight)
            self._ready.set_result(None)
            conductor.run()
            worker.shutdown()
            return
        dist.init_process_group(
            "gloo",
            store=self._store,
            rank=self._rank,
            world_size=self._world_size,
            timeout=timedelta(seconds=JOIN_TIMEOUT_S),
        )
        try:
            transport = GroupTransport(spec.backend, device, self._store, spec.data_timeout_s)
            channel = ControlChannel()
            worker = self._worker = spec.worker(self._rank, device, transport)
            dist.barrier()
            if self._rank == 0:
                self._conductor = conductor = Conductor(worker, channel, spec.in_flight)
                self._ready.set_result(None)
                conductor.run()
                channel.flush()
            else:
                self._ready.set_result(None)
                follow(worker, channel)
            worker.shutdown()
        finally:
            dist.destroy_process_group()
