"""What one rank of a gang does for a video: its stage of each branch, and on the solver's rank the step itself.

    latents ──> stage 0 ──hidden──> ... ──> stage P-1 ──prediction──> solver (rank P-1) ──> latents      (each chain)

Latents return to the first stage of every chain; the second chain's prediction travels to the solver's rank.  All of it
runs on the thread that owns the device; nothing here waits for the device but `collect` and `result`.

Axes: B batch (1), C latent channel, F latent frame, H/W latent height and width, T tokens, D model width.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from diffusers.utils.torch_utils import randn_tensor
from safetensors.torch import save
from torch import Tensor

from deployments.gang.conductor import Result
from deployments.gang.transport import Transport
from deployments.plan import Branch, Step, StepOp
from deployments.stage_cache.skip_schedule import Schedule
from deployments.stage_cache.step_cache import StepCache
from deployments.wan.saved_state import donor_key, solver_state_key
from deployments.wan.solver import Solver
from deployments.wan.solver_state import SolverState
from deployments.wan.stage import Conditioning, RunBlocks, WanStage
from deployments.wan.video_task import VideoTask

logger = logging.getLogger("ray.serve")

Store = Callable[[str, bytes], None]
"""Stores bytes under a key of `saved_state`; called on a thread of its own."""


@dataclass(eq=False)
class _Request:
    task: VideoTask
    solver: Solver
    latents: Tensor
    conditioning: dict[tuple[int, Branch], Conditioning]
    """By expert and branch."""
    cached: bool = False
    """Whether the step cache holds the request; a veto ends that."""
    native: dict[str, Any] | None = None
    """Why a planned reuse does not happen: code, message, and the step from which on."""
    counts: dict[Branch, Counter[StepOp]] = field(default_factory=dict)
    """Steps this rank has run, by branch and by what was done."""
    marks: deque[torch.cuda.Event] = field(default_factory=deque)
    """Ends of the steps that the device may still be working on."""


class VideoWorker:
    """The work of one rank.

    stages: this rank's stage of each expert.  rank: within the gang.  store: None on a gang that saves nothing.
    step_cache: of the rank's only stage; None on a gang whose plans reuse no step.
    """

    def __init__(
        self,
        stages: tuple[WanStage, ...],
        rank: int,
        device: torch.device,
        transport: Transport,
        store: Store | None = None,
        step_cache: StepCache | None = None,
    ) -> None:
        self._stages, self._rank, self._device, self._transport = stages, rank, device, transport
        self._step_cache = step_cache
        self._store = store
        self._saver = ThreadPoolExecutor(1, thread_name_prefix="saver")
        self._requests: dict[int, _Request] = {}
        self._due: deque[_Request] = deque()
        """Second chain's first rank: requests whose latents are on their way, in the order they were sent."""

    @torch.inference_mode()
    def open(self, request: int, spec: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Prepare a request.

        spec: `VideoTask.to_json` under ``task``, and ``resume`` with `SolverState` fields where it goes on.
        tensors: ``text.<branch>`` [1, L, text_dim] for each branch; ``latents`` and ``solver.*`` where it goes on.
        """
        task = VideoTask.from_json(spec["task"])
        plan, resume = task.plan, spec["resume"]
        start = plan.steps[0].index if plan.steps else task.solver.steps
        solver = Solver(task.solver, self._device, start)
        if resume is None:
            noise = torch.Generator("cpu").manual_seed(task.seed)
            latents = randn_tensor(task.latent_shape, noise, self._device, torch.float32)
        else:
            history = {k.removeprefix("solver."): x for k, x in tensors.items() if k.startswith("solver.")}
            solver.load_state(history, resume["numbers"])
            latents = tensors["latents"].to(self._device)
        mine = plan.branches_of(self._rank)
        conditioning = {
            (expert, branch): self._stages[expert].prepare(tensors[f"text.{branch}"].to(self._device), latents.shape)
            for expert in sorted({step.expert for step in plan.steps})
            for branch in mine
        }
        state = self._requests[request] = _Request(task, solver, latents, conditioning)
        state.counts = {branch: Counter() for branch in mine}
        if mine and any(step.op == "reuse" for step in plan.steps):
            self._admit_to_step_cache(request, state, mine)

    def _admit_to_step_cache(self, request: int, state: _Request, mine: Sequence[Branch]) -> None:
        """Every rank decides alike, without asking: they hold the same requests, budgets and hidden states."""
        if self._step_cache is None:
            raise RuntimeError(f"job {state.task.job}: its plan reuses steps, but rank {self._rank} has no step cache")
        stage, conditioning = self._stages[0], state.conditioning[0, mine[0]]
        hidden_bytes = conditioning.rotary[0].shape[1] * stage.width * stage.dtype.itemsize
        reuse = tuple(step.index for step in state.task.plan.steps if step.op == "reuse")
        schedule = Schedule(state.task.solver.steps, reuse)
        start = state.task.plan.steps[0].index
        refused = self._step_cache.admit(request, schedule, state.solver.sigmas, hidden_bytes, mine, start)
        state.cached = refused is None
        if refused is not None:
            state.native = {"code": refused.code, "message": refused.message, "step": 0}

    def vetoed(self, request: int) -> bool:
        """Rank 0: whether a guard has tripped on any rank.  Does not wait."""
        state = self._requests[request]
        if state.cached and state.native is None:
            state.native = self._transport.peek(request, "trip")
        return state.cached and state.native is not None

    def _watch(self, request: int, state: _Request, step: int, native: bool) -> None:
        assert self._step_cache is not None
        if native:
            self._step_cache.veto(request, step)
            state.cached = False
            if state.native is not None:
                state.native["step"] = step
            return
        trip = self._step_cache.trip(request, step)
        if trip is None:
            return
        message = f"rank {self._rank}, step {trip.step}, {trip.branch}: error {trip.error:.4g} above {trip.limit:.4g}"
        note = {"code": trip.reason, "message": message}
        if self._rank == 0:
            state.native = note
        else:
            self._transport.post(request, "trip", note)

    @torch.inference_mode()
    def run(self, request: int, position: int, digest: int, native: bool = False) -> None:
        """This rank's nodes of the plan's step at `position`; queues device work and sends, waits for peers only.

        native: a guard has tripped somewhere, no step is reused from here on.
        """
        state = self._requests[request]
        self._transport.settle(request)
        task, plan = state.task, state.task.plan
        if digest != plan.digest:
            raise RuntimeError(f"job {task.job}: rank 0 walks plan {digest:016x}, rank {self._rank} {plan.digest:016x}")
        step = plan.steps[position]
        chain, index = divmod(self._rank, plan.stages)
        stage = self._stages[step.expert]
        first, last = index == 0, index == plan.stages - 1
        on_solver_rank = self._rank == plan.solver_rank
        predictions: dict[Branch, Tensor] = {}
        mine = plan.branches_of(self._rank)
        self._take_due(state)
        if state.cached:
            self._watch(request, state, step.index, native)
        time = stage.time(state.solver.timesteps[step.index].expand(1)) if mine else None
        for branch in mine:
            assert time is not None
            conditioning = state.conditioning[step.expert, branch]
            if first:
                x = state.latents
            else:
                tokens = (1, conditioning.rotary[0].shape[1], stage.width)
                x = self._transport.recv(tokens, stage.dtype, self._rank - 1, "hidden")
            out = stage(x, conditioning, time, self._runner(request, state, branch, step))
            if not last:
                self._transport.send(out, self._rank + 1, "hidden", request)
            elif on_solver_rank:
                predictions[branch] = out
            else:
                self._transport.send(out, plan.solver_rank, "prediction", request)
        if on_solver_rank:
            self._solve(request, state, position, predictions)
        elif first and mine and chain and position < len(plan.steps) - 1:
            self._due.append(state)
        if position == len(plan.steps) - 1 and self._rank != 0:
            self._transport.post(request, "report", self._report(state))
        if self._device.type == "cuda" and self._rank == 0:
            mark = torch.cuda.Event()
            mark.record()
            state.marks.append(mark)

    def _runner(self, request: int, state: _Request, branch: Branch, step: Step) -> RunBlocks | None:
        """How this step's output comes about: None calls the blocks."""
        state.counts[branch]["reuse" if state.cached and step.op == "reuse" else "full"] += 1
        if not state.cached:
            return None
        assert self._step_cache is not None
        return partial(self._step_cache.run, request, branch, step.index)

    def _report(self, state: _Request) -> dict[str, Any]:
        branches = {branch: {"full": c["full"], "reuse": c["reuse"]} for branch, c in state.counts.items()}
        return {"rank": self._rank, "stage": self._rank % state.task.plan.stages, "branches": branches}

    def _solve(self, request: int, state: _Request, position: int, predictions: dict[Branch, Tensor]) -> None:
        task, plan = state.task, state.task.plan
        step = plan.steps[position]
        prediction = predictions["positive"]
        if "negative" in plan.branches:
            negative = predictions.get("negative")
            if negative is None:
                source = plan.rank("negative", plan.stages - 1)
                negative = self._transport.recv(prediction.shape, prediction.dtype, source, "prediction")
            prediction = negative + task.guidance[step.expert] * (prediction - negative)
        state.latents = state.solver.step(step.index, prediction, state.latents)
        final = position == len(plan.steps) - 1
        for branch in plan.branches[: plan.chains]:
            rank = plan.rank(branch, 0)
            # Rank 0 learns from every step's latents that the step is done; the second chain needs no last ones.
            if rank != self._rank and (rank == 0 or not final):
                self._transport.send(state.latents, rank, "latents", request)
        if self._store is None or final:  # the last step's latents are rank 0's to save, in `result`
            return
        if task.checkpoint_every and (step.index + 1) % task.checkpoint_every == 0:
            self._save_between_steps(state, step.index + 1)
        if step.index + 1 in task.donor_steps:
            latents, copied = self._to_host(state.latents), self._mark()
            self._save(donor_key(task.job, step.index + 1), lambda: save({"latents": latents}), copied)

    def _take_due(self, state: _Request) -> None:
        while state in self._due:
            self._receive_latents(self._due.popleft())

    def _receive_latents(self, state: _Request) -> None:
        task = state.task
        state.latents = self._transport.recv(task.latent_shape, torch.float32, task.plan.solver_rank, "latents")

    @torch.inference_mode()
    def collect(self, request: int, position: int) -> None:
        """Rank 0: take the latents of the step at `position`.

        On a GPU the host stays one step behind the device: it waits for the step before, so that the device always has
        work queued, while progress and cancel stay within a step of the truth.
        """
        state = self._requests[request]
        if state.task.plan.solver_rank != self._rank:
            self._receive_latents(state)
        while len(state.marks) > 1:
            state.marks.popleft().synchronize()

    def result(self, request: int) -> Result:
        """Rank 0, once the last step has been collected: the latents [1, C, F, H, W] fp32, and each rank's report.

        A report: ``rank``, ``stage``, ``branches``: steps ``full`` and ``reuse`` d by branch; rank 0's also ``native``,
        why a planned reuse did not happen, or None.
        """
        state = self._requests[request]
        reports = [self._report(state) | {"native": state.native}]
        if state.task.plan.steps:
            reports += self._transport.gather(request, "report")
        latents, task = state.latents.cpu(), state.task
        last = SolverState(task.solver.steps, latents, {}, {})
        saved = self._save(solver_state_key(task.job), last.to_bytes) if task.checkpoint_every else None
        return Result(latents, reports, saved)

    def close(self, request: int) -> None:
        """Drop what the request holds.  Latents still on their way are taken, or the next request would get them."""
        self._take_due(self._requests.pop(request))
        self._transport.settle(request)
        if self._step_cache is not None:
            self._step_cache.drop(request)

    def shutdown(self) -> None:
        """Finish the writes that have begun."""
        self._saver.shutdown(wait=True, cancel_futures=True)

    def _save_between_steps(self, state: _Request, step: int) -> None:
        tensors, numbers = state.solver.state()
        # Copies on this stream, so the solver may go on; the saver's thread waits for them.
        latents, on_host = self._to_host(state.latents), {name: self._to_host(x) for name, x in tensors.items()}
        saved = SolverState(step, latents, on_host, numbers)
        self._save(solver_state_key(state.task.job), saved.to_bytes, self._mark())

    def _save(
        self, key: str, to_bytes: Callable[[], bytes], copied: torch.cuda.Event | None = None
    ) -> Future[None] | None:
        """On the saver's thread, once `copied` has passed.  Returns None on a gang that saves nothing."""
        store = self._store
        if store is None:
            return None

        def write() -> None:
            if copied:
                copied.synchronize()
            try:
                store(key, to_bytes())
            except Exception:  # the job goes on: a lost worker would only cost it more steps
                logger.exception("%s could not be stored", key)

        return self._saver.submit(write)

    def _mark(self) -> torch.cuda.Event | None:
        """Passed once the device has done what is queued now; None on a CPU."""
        if self._device.type != "cuda":
            return None
        mark = torch.cuda.Event()
        mark.record()
        return mark

    def _to_host(self, x: Tensor) -> Tensor:
        if x.device.type == "cpu":
            return x  # solver tensors are never written in place
        return torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True)
