"""A gang whose ranks write down what they send, receive and compute, and what they still hold at their end."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from deployments.gang.transport import Alone, Lane, Transport
from deployments.stage_cache.anchors import AnchorStore
from deployments.stage_cache.predictor import Linear
from deployments.stage_cache.step_cache import StepCache
from deployments.wan.checkpoint import open_checkpoint, split_blocks
from deployments.wan.stage import WanStage
from deployments.wan.stage_loading import load_stages
from deployments.wan.video_worker import VideoWorker
from tests.gangs import Ask, GangSpec, run_gang_with_reports

POINT_TO_POINT = ("send", "recv", "isend", "irecv")
COLLECTIVES = (
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_to_all",
    "barrier",
    "batch_isend_irecv",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "monitored_barrier",
    "reduce",
    "reduce_scatter",
    "scatter",
)


@dataclass
class StepRecord:
    """One call of a worker's `run`."""

    position: int
    began: float
    """Seconds of the rank's own clock."""
    stacks: int = 0
    """Block stacks run: one for each branch of a full step."""
    events: list[str] = field(default_factory=list)
    """Tensors sent and received, in order: "send hidden to 1: (1, 12, 48) torch.float32".  What is received between
    two steps of the request belongs to the earlier one."""


@dataclass
class RequestRecord:
    """What one rank did for one request."""

    job: str
    steps: list[StepRecord] = field(default_factory=list)
    distributed: dict[str, int] = field(default_factory=dict)
    """Calls of `torch.distributed` since the request before was closed, the control channel's included."""


@dataclass
class RankRecord:
    """All of one rank's requests, and what was left of them when the rank ended."""

    requests: list[RequestRecord] = field(default_factory=list)
    unsettled: int = 0
    """Tensors sent and never waited for."""
    residual_bytes: int = 0
    """Held or reserved by the step cache."""
    open_requests: int = 0


@dataclass(frozen=True)
class WatchedSpec(GangSpec):
    """Requests of one wave are told apart only where waves have one request each."""

    records: str = ""
    """Folder for `rank-<n>.json`."""
    stack_seconds: float | None = None
    """Blocks do nothing and together sleep this long; None runs them."""
    budget_bytes: int = 1 << 30

    def worker(self, rank: int, device: torch.device, transport: Transport) -> VideoWorker:
        checkpoint = open_checkpoint(self.folder)
        blocks = split_blocks(checkpoint.num_blocks, self.pp, self.split)[rank % self.pp]
        stages = load_stages(checkpoint, blocks, self.dtype, device)
        if self.stack_seconds is not None:
            for stage in stages:
                stage.model.blocks = nn.ModuleList(
                    _Sleep(block, self.stack_seconds / len(blocks)) for block in stage.model.blocks
                )
        return WatchedWorker(stages, rank, device, transport, self)


class _Sleep(nn.Module):
    def __init__(self, block: nn.Module, seconds: float) -> None:
        super().__init__()
        self.attn2 = block.attn2  # a stage prepares the text with it
        self._seconds = seconds

    def forward(self, hidden: Tensor, *_: object) -> Tensor:
        time.sleep(self._seconds)
        return hidden


class WatchedWorker(VideoWorker):
    """A worker with linear prediction that keeps a `RankRecord`."""

    def __init__(
        self,
        stages: tuple[WanStage, ...],
        rank: int,
        device: torch.device,
        transport: Transport,
        spec: WatchedSpec,
    ) -> None:
        self._record, self._calls = RankRecord(), Counter[str]()
        self._file = Path(spec.records) / f"rank-{rank}.json"
        self._anchors = AnchorStore(spec.budget_bytes)
        self._inner = transport
        if not isinstance(transport, Alone):  # a gang of one runs in the test's own process
            _count_calls(self._calls)
        for stage in stages:
            stage.model.blocks[0].register_forward_hook(self._stack_ran)
        cache = StepCache(Linear(), self._anchors, device)
        super().__init__(stages, rank, device, _Spy(transport, self._saw), None, cache)

    def open(self, request: int, spec: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        super().open(request, spec, tensors)
        self._record.requests.append(RequestRecord(spec["task"]["job"]))

    def run(self, request: int, position: int, digest: int, native: bool = False) -> None:
        self._record.requests[-1].steps.append(StepRecord(position, time.perf_counter()))
        super().run(request, position, digest, native)

    def close(self, request: int) -> None:
        super().close(request)
        self._record.requests[-1].distributed = dict(self._calls)
        self._calls.clear()

    def shutdown(self) -> None:
        super().shutdown()
        sent = {} if isinstance(self._inner, Alone) else self._inner._sent
        self._record.unsettled = sum(len(works) for works in sent.values())
        self._record.residual_bytes = self._anchors.held_bytes + self._anchors.reserved_bytes
        self._record.open_requests = len(self._requests)
        self._file.write_text(json.dumps(asdict(self._record)))

    def _stack_ran(self, *_: object) -> None:
        self._record.requests[-1].steps[-1].stacks += 1

    def _saw(self, event: str) -> None:
        self._record.requests[-1].steps[-1].events.append(event)


class _Spy:
    """A transport that tells what passes."""

    def __init__(self, inner: Transport, saw: Any) -> None:
        self._inner, self._saw = inner, saw
        self.settle, self.peek, self.gather = inner.settle, inner.peek, inner.gather

    def send(self, tensor: Tensor, to: int, lane: Lane, request: int) -> None:
        self._saw(f"send {lane} to {to}: {tuple(tensor.shape)} {tensor.dtype}")
        self._inner.send(tensor, to, lane, request)

    def recv(self, shape: Sequence[int], dtype: torch.dtype, source: int, lane: Lane) -> Tensor:
        self._saw(f"recv {lane} from {source}: {tuple(shape)} {dtype}")
        return self._inner.recv(shape, dtype, source, lane)

    def post(self, request: int, topic: str, note: dict[str, Any]) -> None:
        self._saw(f"post {topic}")
        self._inner.post(request, topic, note)


def _count_calls(calls: Counter[str]) -> None:
    def counted(name: str, function: Any, *args: Any, **kwargs: Any) -> Any:
        calls[name] += 1
        return function(*args, **kwargs)

    for name in POINT_TO_POINT + COLLECTIVES:
        setattr(dist, name, partial(counted, name, getattr(dist, name)))


def run_watched(
    spec: WatchedSpec, asks: Sequence[Ask], tmp_path: Path
) -> tuple[dict[str, Tensor], dict[str, list[dict[str, Any]]], list[RankRecord]]:
    """Run requests one after the other.  Returns latents and reports by job, and the record of each rank."""
    latents, reports = run_gang_with_reports(spec, [[ask] for ask in asks], tmp_path)
    ranks = range(spec.pp * spec.cfg)
    return latents, reports, [_read(Path(spec.records) / f"rank-{rank}.json") for rank in ranks]


def _read(path: Path) -> RankRecord:
    data = json.loads(path.read_text())
    requests = [
        RequestRecord(one["job"], [StepRecord(**step) for step in one["steps"]], one["distributed"])
        for one in data.pop("requests")
    ]
    return RankRecord(requests, **data)
