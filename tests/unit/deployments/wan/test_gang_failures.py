"""A rank that fails, and plans that do not fit their gang: all ranks end, the caller hears why, nobody falls back."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from deployments.gang.rank import Rank
from deployments.gang.transport import Transport
from deployments.wan.video_worker import VideoWorker
from tests.checkpoints import write_wan_checkpoint
from tests.gangs import Ask, GangSpec, StepCacheSpec, Waiter, run_gang

SHAPE = (1, 16, 2, 4, 6)
STEPS = 10
REUSE = (4, 6)
DONE = 5
"""Steps before the failure."""


@dataclass(frozen=True)
class BreakingSpec(GangSpec):
    breaks: int = 0
    """The rank that fails in the middle of a request, with tensors of it on their way."""

    def worker(self, rank: int, device: torch.device, transport: Transport) -> VideoWorker:
        worker = super().worker(rank, device, transport)
        if rank == self.breaks:
            run = worker.run

            def breaking(request: int, position: int, digest: int, native: bool = False) -> None:
                if position == DONE:
                    raise RuntimeError("the device is gone")
                run(request, position, digest, native)

            worker.run = breaking  # type: ignore[method-assign]
        return worker


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_wan_checkpoint(tmp_path_factory.mktemp("wan"), num_blocks=2))


@pytest.fixture(scope="module")
def text() -> dict[str, Tensor]:
    noise = torch.Generator().manual_seed(5)
    return {branch: torch.randn(1, 32, 32, generator=noise) for branch in ("positive", "negative")}


def rank_until_its_end(rank: int, spec: GangSpec, request: Ask, store_file: str, out: str) -> None:
    """One rank: writes how it ended."""
    world = spec.pp * spec.cfg
    member = Rank(spec, rank, world, dist.FileStore(store_file, world))
    member.wait_ready()
    heard = None
    if rank == 0:
        waiter = Waiter()
        member.conductor.submit(request.submission(spec, waiter))
        assert waiter.ended.wait(60)
        assert waiter.result is None
        heard = {"error": str(waiter.error), "steps": waiter.steps}
    member._thread.join(30)  # half of what a receive would wait: the loss itself ends it
    ending = {"alive": member.alive, "failure": str(member.failure), "groups": dist.is_initialized(), "heard": heard}
    (Path(out) / f"{rank}.json").write_text(json.dumps(ending))


@pytest.mark.parametrize(("pp", "cfg", "breaks"), [(2, 1, 0), (2, 1, 1), (2, 2, 3)])
def test_a_rank_that_fails_ends_the_whole_gang_and_the_caller_hears(
    folder: str, text: dict[str, Tensor], tmp_path: Path, pp: int, cfg: int, breaks: int
) -> None:
    spec = BreakingSpec(folder, pp, cfg, step_cache=StepCacheSpec(), breaks=breaks)
    request = Ask("job", text, SHAPE, STEPS, reuse=REUSE)
    out = tmp_path / "out"
    out.mkdir()
    mp.start_processes(
        rank_until_its_end,
        (spec, request, str(tmp_path / "store"), str(out)),
        nprocs=pp * cfg,
        start_method="forkserver",
    )
    endings = [json.loads((out / f"{rank}.json").read_text()) for rank in range(pp * cfg)]
    assert endings[breaks]["failure"] == "the device is gone"
    for ending in endings:
        # No thread waits for a tensor that was on its way, and no group is left that would.
        assert (ending["alive"], ending["groups"]) == (False, False)
        assert ending["failure"] != "None"
    assert endings[0]["heard"]["error"] == endings[0]["failure"]
    assert endings[0]["heard"]["steps"] == list(range(1, DONE + 1))


@pytest.mark.parametrize(("stages", "chains"), [(1, 2), (2, 1)])
def test_a_plan_for_more_ranks_than_there_are_is_no_plan_for_fewer(
    folder: str, text: dict[str, Tensor], tmp_path: Path, stages: int, chains: int
) -> None:
    """Both branches after each other would give the right latents, and hide that half of the gang is missing."""

    class Mistaken(Ask):
        def submission(self, spec: GangSpec, listener: Waiter):
            return super().submission(GangSpec(spec.folder, stages, chains), listener)

    with pytest.raises(RuntimeError, match="a gang of one rank was asked to"):
        run_gang(GangSpec(folder), [[Mistaken("job", text, SHAPE, steps=2)]], tmp_path)
