"""Runs a gang of real processes over gloo, without Ray, for tests that compare topologies."""

from __future__ import annotations

import json
import multiprocessing
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors.torch import load_file, save_file
from torch import Tensor

from app.planning.video_plan import video_plan
from deployments.gang.conductor import Result, Submission
from deployments.gang.rank import Rank
from deployments.gang.transport import Transport
from deployments.plan import BRANCHES, Branch, Plan
from deployments.stage_cache.anchors import AnchorStore
from deployments.stage_cache.predictor import Linear
from deployments.stage_cache.step_cache import StepCache
from deployments.wan.checkpoint import open_checkpoint, split_blocks
from deployments.wan.solver_spec import SolverSpec
from deployments.wan.solver_state import SolverState
from deployments.wan.stage_loading import load_stages
from deployments.wan.video_task import VideoTask
from deployments.wan.video_worker import VideoWorker


@dataclass(frozen=True)
class StepCacheSpec:
    """Linear prediction; the rank `trips_on` finds fault with its check at step `checked`."""

    budget_bytes: int = 1 << 30
    trips_on: int | None = None
    checked: int = 3

    def build(self, rank: int, device: torch.device) -> StepCache:
        limits: dict[tuple[Branch, int], float] = {}
        if rank == self.trips_on:
            limits = {(branch, self.checked): 1e-9 for branch in BRANCHES}
        return StepCache(Linear(), AnchorStore(self.budget_bytes), device, limits)


@dataclass(frozen=True)
class GangSpec:
    """A `RankSpec` on the CPU, one thread a rank so that sums are split alike in every topology."""

    folder: str
    pp: int = 1
    cfg: int = 1
    split: tuple[int, ...] | None = None
    dtype: torch.dtype = torch.float32
    in_flight: int = 2
    states: str | None = None
    """Folder for saved solver states."""
    step_cache: StepCacheSpec | None = None

    backend = "gloo"
    data_timeout_s = 60.0
    threads = 1

    def device(self, rank: int) -> torch.device:
        return torch.device("cpu")

    def worker(self, rank: int, device: torch.device, transport: Transport) -> VideoWorker:
        checkpoint = open_checkpoint(self.folder)
        index = rank % self.pp
        blocks = split_blocks(checkpoint.num_blocks, self.pp, self.split)[index]
        stages = load_stages(checkpoint, blocks, self.dtype, device)
        cache = self.step_cache.build(rank, device) if self.step_cache else None
        return VideoWorker(stages, rank, device, transport, self._save if self.states else None, cache)

    def _save(self, key: str, data: bytes) -> None:
        assert self.states is not None
        job, name = key.split("/")
        if name.startswith("donor"):
            (Path(self.states) / f"{job}-{name}").write_bytes(data)
        else:
            state = SolverState.from_bytes(data)
            (Path(self.states) / f"{job}-{state.step:03d}").write_bytes(data)


@dataclass(frozen=True)
class Ask:
    """One request of a test."""

    job: str
    text: Mapping[str, Tensor]
    """``positive`` and ``negative`` embeddings [1, L, text_dim]."""
    latent_shape: tuple[int, int, int, int, int]
    steps: int = 4
    seed: int = 0
    guidance: tuple[float, float] = (5.0, 5.0)
    flow_shift: float = 3.0
    checkpoint_every: int = 0
    donor_steps: tuple[int, ...] = ()
    resume: SolverState | None = None
    reuse: tuple[int, ...] = ()
    """Steps that the plan reuses."""
    cancel_after: int | None = None
    """Cancel once so many steps are done."""

    def submission(self, spec: GangSpec, listener: Any) -> Submission:
        checkpoint = open_checkpoint(spec.folder)
        solver = SolverSpec(
            checkpoint.scheduler,
            checkpoint.scheduler_config,
            self.steps,
            self.flow_shift,
            checkpoint.boundary_ratio,
        )
        start = self.resume.step if self.resume else 0
        plan: Plan = video_plan(
            stages=spec.pp,
            chains=spec.cfg,
            guidance_scale=self.guidance[0],
            experts=solver.experts(),
            start=start,
            reuse=self.reuse,
        )
        task = VideoTask(
            self.job,
            plan,
            solver,
            self.latent_shape,
            self.seed,
            self.guidance,
            self.checkpoint_every,
            self.donor_steps,
        )
        tensors = {f"text.{branch}": x for branch, x in self.text.items()}
        resume = None
        if self.resume:
            resume = {"step": self.resume.step, "numbers": dict(self.resume.numbers)}
            tensors |= {"latents": self.resume.latents}
            tensors |= {f"solver.{name}": x for name, x in self.resume.tensors.items()}
        message = {"task": task.to_json(), "resume": resume}
        return Submission(self.job, message, tensors, start, len(plan.steps), plan.digest, listener)


class Waiter:
    """A listener that waits for the end and may cancel on the way."""

    def __init__(self, on_step: Callable[[int], None] | None = None) -> None:
        self.ended = threading.Event()
        self.steps: list[int] = []
        self.result: Result | None = None
        self.error: BaseException | None = None
        self._on_step = on_step

    def on_step(self, done: int) -> None:
        self.steps.append(done)
        if self._on_step:
            self._on_step(done)

    def on_result(self, result: Result, seconds: float) -> None:
        if result.saved is not None:
            result.saved.result()  # as the replica waits before it calls the job denoised
        self.result = result
        self.ended.set()

    def on_failure(self, error: BaseException) -> None:
        self.error = error
        self.ended.set()


def run_gang(spec: GangSpec, waves: Sequence[Sequence[Ask]], tmp_path: Path) -> dict[str, Tensor]:
    """Run the requests, a wave at once.  Returns final latents by job, cancelled ones left out."""
    return run_gang_with_reports(spec, waves, tmp_path)[0]


def run_gang_with_reports(
    spec: GangSpec, waves: Sequence[Sequence[Ask]], tmp_path: Path
) -> tuple[dict[str, Tensor], dict[str, list[dict[str, Any]]]]:
    """As `run_gang`, with the reports of all ranks by job."""
    world = spec.pp * spec.cfg
    store_file = tmp_path / f"store-{spec.pp}-{spec.cfg}-{len(list(tmp_path.iterdir()))}"
    out = tmp_path / f"{store_file.name}-out.safetensors"
    arguments = (spec, waves, str(store_file), world, str(out))
    if world == 1:
        _rank(0, *arguments)
    else:
        # Ranks fork from a server that has imported torch and diffusers once; each fresh import takes seconds.
        multiprocessing.set_forkserver_preload(["tests.gangs"])
        mp.start_processes(_rank, arguments, nprocs=world, start_method="forkserver")
    reports: dict[str, list[dict[str, Any]]] = json.loads(out.with_suffix(".json").read_text())
    return load_file(out), reports


def _rank(rank: int, spec: GangSpec, waves: Sequence[Sequence[Ask]], store_file: str, world: int, out: str) -> None:
    store = dist.FileStore(store_file, world) if world > 1 else None
    member = Rank(spec, rank, world, store)
    member.wait_ready()
    if rank == 0:
        results: dict[str, Result] = {}
        for wave in waves:
            results |= _wave(member, spec, wave)
        member.stop(60)
        save_file({job: result.latents.contiguous() for job, result in results.items()}, out)
        reports = {job: result.ranks for job, result in results.items()}
        Path(out).with_suffix(".json").write_text(json.dumps(reports))
    else:
        member._thread.join()
    if member.failure is not None:
        raise member.failure


def _wave(member: Rank, spec: GangSpec, wave: Sequence[Ask]) -> dict[str, Result]:
    conductor = member.conductor
    waiters: dict[str, Waiter] = {}
    for ask in wave:
        waiter = Waiter()
        if ask.cancel_after is not None:

            def cancel(done: int, ask: Ask = ask, waiter: Waiter = waiter) -> None:
                if done == ask.cancel_after:
                    conductor.cancel(ask.job, waiter)
                    waiter.ended.set()

            waiter._on_step = cancel
        waiters[ask.job] = waiter
        conductor.submit(ask.submission(spec, waiter))
    for job, waiter in waiters.items():
        if not waiter.ended.wait(120):
            raise TimeoutError(f"{job} did not end")
        if waiter.error is not None:
            raise waiter.error
    return {job: w.result for job, w in waiters.items() if w.result is not None}
