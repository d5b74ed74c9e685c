"""Ranks of a benchmarked gang: `deployments`' own worker, with marks around what it waits for and computes.

A mark is a point on the device's stream (a CUDA event) or, on a CPU, a time: nothing here waits for the device before
the gang's end, when all marks are read.
"""

from __future__ import annotations

import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from app.jobs.bench.reuse import timing_step_cache
from deployments.gang.transport import Alone, Backend, Lane, Transport
from deployments.wan.checkpoint import open_checkpoint, split_blocks
from deployments.wan.memory_plan import DTYPES
from deployments.wan.stage import WanStage
from deployments.wan.stage_loading import load_stages
from deployments.wan.video_worker import VideoWorker

HOP_REPEATS = 20
HOP_REQUEST = 0
"""Under which the hop's tensors are sent; a conductor numbers from 1."""
Mark = float | torch.cuda.Event
Activity = Literal["run", "stage", "wait"]


class Marks:
    """Intervals of one rank by request and activity, on the clock of its device."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._intervals: dict[tuple[int, Activity], list[tuple[Mark, Mark]]] = defaultdict(list)
        self.request: int | None = None
        """Whose step runs now; between steps nothing is kept."""

    def now(self) -> Mark:
        """A mark at the end of what has been queued."""
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def add(self, activity: Activity, start: Mark) -> None:
        """An interval from `start` to here."""
        if self.request is not None:
            self._intervals[self.request, activity].append((start, self.now()))

    def seconds(self) -> dict[int, dict[Activity, tuple[int, float]]]:
        """Count and sum by request and activity; waits for the device."""
        if self._on_gpu:
            torch.cuda.synchronize()
        out: dict[int, dict[Activity, tuple[int, float]]] = defaultdict(dict)
        for (request, activity), intervals in self._intervals.items():
            out[request][activity] = len(intervals), sum(_between(*interval) for interval in intervals)
        return dict(out)


def _between(start: Mark, end: Mark) -> float:
    if isinstance(start, float):
        assert isinstance(end, float)
        return end - start
    assert not isinstance(end, float)
    return start.elapsed_time(end) / 1000


class _MarkedTransport:
    """Marks the waits for a peer; on NCCL the device waits, and its clock sees it."""

    def __init__(self, transport: Transport, marks: Marks) -> None:
        self._transport, self._marks = transport, marks

    def send(self, tensor: Tensor, to: int, lane: Lane, request: int) -> None:
        self._transport.send(tensor, to, lane, request)

    def recv(self, shape: Sequence[int], dtype: torch.dtype, source: int, lane: Lane) -> Tensor:
        start = self._marks.now()
        out = self._transport.recv(shape, dtype, source, lane)
        self._marks.add("wait", start)
        return out

    def settle(self, request: int) -> None:
        self._transport.settle(request)

    def post(self, request: int, topic: str, note: dict[str, Any]) -> None:
        self._transport.post(request, topic, note)

    def peek(self, request: int, topic: str) -> dict[str, Any] | None:
        return self._transport.peek(request, topic)

    def gather(self, request: int, topic: str) -> list[dict[str, Any]]:
        return self._transport.gather(request, topic)


@dataclass
class RankReport:
    """What one rank measured, plain data."""

    seconds: dict[int, dict[Activity, tuple[int, float]]] = field(default_factory=dict)
    hop_s: dict[int, float] = field(default_factory=dict)
    """By tokens: a hidden state from rank 0 to rank 1, half of a round trip, median; on rank 0."""
    peak_bytes: int | None = None
    """Largest sum of tensors on the GPU."""
    syncs: list[str] = field(default_factory=list)
    """Where the host waited for the device inside `run` of the watched request."""


class MarkedWorker(VideoWorker):
    """A `VideoWorker` that reports.  watched: the request whose steps are searched for waits of the host, or None."""

    def __init__(
        self,
        stages: tuple[WanStage, ...],
        rank: int,
        device: torch.device,
        transport: Transport,
        report: RankReport,
        on_end: Callable[[RankReport], None],
        watched: int | None,
    ) -> None:
        self._marks, self._findings, self._on_end, self._watched = Marks(device), report, on_end, watched
        self._on_gpu = device.type == "cuda"
        super().__init__(
            stages, rank, device, _MarkedTransport(transport, self._marks), step_cache=timing_step_cache(device)
        )
        starts: list[Mark] = []
        for stage in stages:
            stage.register_forward_pre_hook(lambda *_: starts.append(self._marks.now()))
            stage.register_forward_hook(lambda *_: self._marks.add("stage", starts.pop()))

    def run(self, request: int, position: int, digest: int, native: bool = False) -> None:
        """As `VideoWorker.run`, between marks."""
        self._marks.request = request
        start = self._marks.now()
        if request == self._watched:
            self._findings.syncs += _syncs(lambda: super(MarkedWorker, self).run(request, position, digest, native))
        else:
            super().run(request, position, digest, native)
        self._marks.add("run", start)
        self._marks.request = None

    def shutdown(self) -> None:
        """The gang's end: read the marks and report."""
        super().shutdown()
        self._findings.seconds = self._marks.seconds()
        if self._on_gpu:
            self._findings.peak_bytes = torch.cuda.max_memory_allocated()
        self._on_end(self._findings)


def _syncs(work: Callable[[], None]) -> list[str]:
    """Every wait of the host for the device that torch notices while `work` runs, with its place."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            work()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return [f"{w.filename}:{w.lineno}" for w in caught if "called a synchronizing" in str(w.message)]


@dataclass(frozen=True)
class BenchRankSpec:
    """A `RankSpec` whose ranks report; picklable.  Rank r uses GPU r, or shares the only one."""

    folder: str
    pp: int
    cfg: int
    dtype: Literal["float32", "bfloat16"]
    compile_blocks: bool
    in_flight: int
    on_gpu: bool
    backend: Backend
    hop_tokens: tuple[int, ...]
    """Sizes of the hidden states whose hop is measured before the work starts."""
    watched: int | None
    on_end: Callable[[RankReport], None]
    threads: int | None = None

    data_timeout_s = 900.0
    """A peer may be compiling."""

    def device(self, rank: int) -> torch.device:
        """Of a rank."""
        return torch.device("cuda", rank % torch.cuda.device_count()) if self.on_gpu else torch.device("cpu")

    def worker(self, rank: int, device: torch.device, transport: Transport) -> MarkedWorker:
        """Load the rank's blocks and measure the hop."""
        checkpoint = open_checkpoint(self.folder)
        blocks = split_blocks(checkpoint.num_blocks, self.pp, None)[rank % self.pp]
        stages = load_stages(checkpoint, blocks, DTYPES[self.dtype], device, compile_blocks=self.compile_blocks)
        report = RankReport()
        if not isinstance(transport, Alone):
            dist.barrier()  # ranks load at their own pace
            for tokens in self.hop_tokens:
                hidden = torch.zeros(1, tokens, stages[0].width, dtype=DTYPES[self.dtype], device=device)
                if rank < 2:
                    report.hop_s[tokens] = _hop(transport, hidden, rank)
        return MarkedWorker(stages, rank, device, transport, report, self.on_end, self.watched)


def _hop(transport: Transport, hidden: Tensor, rank: int) -> float:
    """Ranks 0 and 1 throw a hidden state to and fro.  Two lanes: in one, NCCL would let both wait."""
    there: Lane = "hidden" if rank == 0 else "latents"
    back: Lane = "latents" if rank == 0 else "hidden"
    times = []
    for _ in range(HOP_REPEATS):
        if hidden.is_cuda:
            torch.cuda.synchronize()
        began = time.perf_counter()
        if rank == 0:
            transport.send(hidden, 1, there, HOP_REQUEST)
        received = transport.recv(hidden.shape, hidden.dtype, 1 - rank, back)
        if rank == 1:
            transport.send(received, 0, there, HOP_REQUEST)
        if hidden.is_cuda:
            torch.cuda.synchronize()
        times.append((time.perf_counter() - began) / 2)
        transport.settle(HOP_REQUEST)
    return median(times)
