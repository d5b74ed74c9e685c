"""A gang of real rank processes on this machine, without Ray: for jobs that measure topologies.

Rank processes fork from a server that has imported torch and diffusers once; a fresh import takes seconds a rank.

    LocalGang(spec) ─> run, run, ... (one request at a time) ─> close
"""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import torch
import torch.distributed as dist
from safetensors.torch import load, save
from torch import Tensor

from app.jobs.processes import process_context
from deployments.gang.conductor import Result, Submission
from deployments.gang.rank import Rank
from deployments.gang.transport import Backend, Transport
from deployments.plan import Branch
from deployments.wan.checkpoint import open_checkpoint, split_blocks
from deployments.wan.memory_plan import DTYPES
from deployments.wan.stage_loading import load_stages
from deployments.wan.video_rank import StageCaching
from deployments.wan.video_task import VideoTask
from deployments.wan.video_worker import VideoWorker

STOP_S = 60.0
READY = b"ready"


class GangEnded(RuntimeError):
    """The gang's rank 0 has gone, or reports what broke it."""


@dataclass(frozen=True)
class LocalRankSpec:
    """A `RankSpec` whose ranks are processes of one machine.  Rank r uses GPU r; ranks share GPUs when there are fewer.

    threads: torch threads of a rank on a CPU.  1 splits sums alike in every topology, so that latents are bit-equal.
    """

    checkpoint: str
    revision: str | None
    dtype: Literal["float32", "bfloat16"]
    pp: int
    cfg: int
    on_gpu: bool
    step_cache: StageCaching | None
    threads: int = 1

    in_flight = 1
    data_timeout_s = 900.0

    @property
    def ranks(self) -> int:
        """Processes of the gang."""
        return self.pp * self.cfg

    @property
    def backend(self) -> Backend:
        """How tensors travel: NCCL where each rank has a GPU of its own."""
        if not self.on_gpu:
            return "gloo"
        return "nccl" if torch.cuda.device_count() >= self.ranks else "staged"

    def device(self, rank: int) -> torch.device:
        """Of a rank."""
        return torch.device("cuda", rank % torch.cuda.device_count()) if self.on_gpu else torch.device("cpu")

    def worker(self, rank: int, device: torch.device, transport: Transport) -> VideoWorker:
        """Load the rank's blocks, and its share of the profile."""
        checkpoint = open_checkpoint(self.checkpoint, self.revision)
        split = split_blocks(checkpoint.num_blocks, self.pp, None)
        stages = load_stages(checkpoint, split[rank % self.pp], DTYPES[self.dtype], device)
        cache = None
        if self.step_cache is not None:
            cache = self.step_cache.build(tuple(map(len, split)), rank % self.pp, device)
        return VideoWorker(stages, rank, device, transport, None, cache)


class LocalGang:
    """Starts the ranks and waits until they have loaded and met; a context manager that ends them."""

    def __init__(self, spec: LocalRankSpec) -> None:
        context = process_context(spec.on_gpu, __name__)
        self._scratch = tempfile.TemporaryDirectory(prefix="local-gang-")
        self._commands, remote = context.Pipe()
        store = str(Path(self._scratch.name, "store"))
        self._ranks = [
            context.Process(target=_rank_process, args=(rank, spec, store, remote if rank == 0 else None), daemon=True)
            for rank in range(spec.ranks)
        ]
        for process in self._ranks:
            process.start()
        remote.close()
        self._receive()

    def run(self, task: VideoTask, text: Mapping[Branch, Tensor]) -> Result:
        """One request from its seed to its latents.  text: [1, L, text_dim] of each branch of the task's plan."""
        tensors = {f"text.{branch}": text[branch].contiguous() for branch in task.plan.branches}
        self._commands.send((task, save(tensors)))
        latents, reports = self._receive()
        return Result(load(latents)["latents"], reports)

    def close(self) -> None:
        """Orderly end; ranks that do not follow it within a minute are terminated."""
        with suppress(OSError):  # rank 0 may have gone already
            self._commands.send(None)
        for process in self._ranks:
            process.join(STOP_S)
            if process.is_alive():
                process.terminate()
        self._commands.close()
        self._scratch.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _receive(self) -> Any:
        try:
            answer = self._commands.recv()
        except EOFError:
            raise GangEnded("rank 0 has ended; its output above says why") from None
        if isinstance(answer, BaseException):
            raise GangEnded(str(answer)) from answer
        return answer


class _Waiter:
    """A `Listener` that sleeps until the end."""

    def __init__(self) -> None:
        self._ended = threading.Event()
        self._outcome: Result | BaseException | None = None

    def on_step(self, done: int) -> None:
        """Nobody watches the steps."""

    def on_result(self, result: Result, seconds: float) -> None:
        """The request is complete."""
        self._outcome = result
        self._ended.set()

    def on_failure(self, error: BaseException) -> None:
        """The gang broke."""
        self._outcome = error
        self._ended.set()

    def wait(self) -> Result | BaseException | None:
        """What came of it."""
        self._ended.wait()
        return self._outcome


def _rank_process(rank: int, spec: LocalRankSpec, store_file: str, commands: Connection | None) -> None:
    store = dist.FileStore(store_file, spec.ranks) if spec.ranks > 1 else None
    member = Rank(spec, rank, spec.ranks, store)
    member.wait_ready()
    if commands is not None:
        commands.send(READY)
        _serve(member, commands)
    while member.alive:
        member.stop(STOP_S)
    if member.failure is not None:
        raise member.failure


def _serve(member: Rank, commands: Connection) -> None:
    number = 0
    while (command := commands.recv()) is not None:
        task, tensors = command
        waiter, number = _Waiter(), number + 1
        spec = {"task": task.to_json(), "resume": None}
        plan = task.plan
        member.conductor.submit(
            Submission(f"{task.job}-{number}", spec, load(tensors), 0, len(plan.steps), plan.digest, waiter)
        )
        outcome = waiter.wait()
        if isinstance(outcome, Result):
            commands.send((save({"latents": outcome.latents.contiguous()}), outcome.ranks))
        else:
            commands.send(RuntimeError(repr(outcome)))
