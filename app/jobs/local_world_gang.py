"""A gang of world ranks on this machine, without Ray: rank 0 in this process, each other rank in a process of its own.

LocalWorldGang(spec) ─> live, kept ─> run, run, ... (one request at a time) ─> close
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self, cast

import torch
import torch.distributed as dist
from torch import Tensor

from app.jobs.local_gang import STOP_S, GangEnded
from app.jobs.processes import process_context
from cache_actors.keys import Key
from deployments.gang.conductor import Result, Submission
from deployments.gang.rank import Rank
from deployments.gang.transport import Backend
from deployments.lingbot.world_rank import WorldRankSpec
from deployments.lingbot.world_task import WorldTask
from deployments.lingbot.world_worker import WorldWorker


@dataclass(frozen=True)
class LocalWorldRankSpec(WorldRankSpec):
    """Rank r uses GPU r; ranks share GPUs when there are fewer."""

    def device(self, rank: int) -> torch.device:
        """Of a rank of this machine."""
        return torch.device("cuda", rank % torch.cuda.device_count()) if self.on_gpu else torch.device("cpu")


def local_backend(pp: int, on_gpu: bool) -> Backend:
    """NCCL where each rank has a GPU of its own."""
    if not on_gpu:
        return "gloo"
    return "nccl" if torch.cuda.device_count() >= pp else "staged"


class LocalWorldGang:
    """Starts the ranks and waits until they have loaded and met; a context manager that ends them."""

    def __init__(self, spec: WorldRankSpec) -> None:
        context = process_context(spec.on_gpu, __name__)
        self._scratch = tempfile.TemporaryDirectory(prefix="local-gang-")
        store = str(Path(self._scratch.name, "store"))
        self._others = [
            context.Process(target=_rank_process, args=(rank, spec, store), daemon=True) for rank in range(1, spec.pp)
        ]
        for process in self._others:
            process.start()
        self._first = Rank(spec, 0, spec.pp, dist.FileStore(store, spec.pp) if spec.pp > 1 else None)
        self._first.wait_ready()
        self._requests = 0

    def live(self, world: str, keys: Sequence[Key]) -> int:
        """As `WorldWorker.live`."""
        return self._worker.live(world, keys)

    def kept(self, keys: Sequence[Key]) -> list[bool]:
        """As `WorldWorker.kept`."""
        return self._worker.kept(keys)

    def blob(self, key: Key) -> Tensor | None:
        """As `WorldWorker.blob`, of rank 0."""
        return self._worker.blob(key)

    def run(self, task: WorldTask, tensors: Mapping[str, Tensor]) -> Result:
        """One request, see `WorldWorker.result`; on a GPU the last clean pass may still be running.

        Raises GangEnded.
        """
        self._requests += 1
        outcome = _Outcome()
        plan = task.plan
        self._first.conductor.submit(
            Submission(
                f"{task.world}-{self._requests}",
                {"task": task.to_json()},
                tensors,
                0,
                len(plan.passes),
                plan.digest,
                outcome,
            )
        )
        return outcome.future.result()

    def close(self) -> None:
        """Orderly end; ranks that do not follow it within a minute are terminated."""
        self._first.stop(STOP_S)
        for process in self._others:
            process.join(STOP_S)
            if process.is_alive():
                process.terminate()
        self._scratch.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def _worker(self) -> WorldWorker:
        return cast(WorldWorker, self._first.worker)


class _Outcome:
    """A `Listener` that a caller waits for."""

    def __init__(self) -> None:
        self.future: Future[Result] = Future()

    def on_step(self, done: int) -> None:
        """Nobody watches the passes."""

    def on_result(self, result: Result, seconds: float) -> None:
        """The request is complete."""
        self.future.set_result(result)

    def on_failure(self, error: BaseException) -> None:
        """The gang broke."""
        ended = GangEnded(repr(error))
        ended.__cause__ = error
        self.future.set_exception(ended)


def _rank_process(rank: int, spec: WorldRankSpec, store: str) -> None:
    member = Rank(spec, rank, spec.pp, dist.FileStore(store, spec.pp))
    member.join()
    if member.failure is not None:
        raise member.failure
