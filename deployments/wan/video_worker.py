"""What one rank of a gang does for a video: its stage of each branch, and on the solver's rank the step itself.

    latents ──> stage 0 ──hidden──> ... ──> stage P-1 ──prediction──> solver ──> latents      (each chain; solver: rank P-1)

Latents return to the first stage of every chain; the second chain's prediction travels to the solver's rank.  All of it
runs on the thread that owns the device; nothing here waits for the device but `collect` and `result`.

Axes: B batch (1), C latent channel, F latent frame, H/W latent height and width, T tokens, D model width.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from diffusers.utils.torch_utils import randn_tensor
from torch import Tensor

from deployments.gang.transport import Transport
from deployments.plan import Branch
from deployments.wan.solver import Solver
from deployments.wan.stage import Conditioning, WanStage
from deployments.wan.video_task import SolverState, VideoTask

SaveState = Callable[[str, bytes], None]
"""Stores a job's solver state; called on a thread of its own."""


@dataclass(eq=False)
class _Request:
    task: VideoTask
    solver: Solver
    latents: Tensor
    conditioning: dict[tuple[int, Branch], Conditioning]
    """By expert and branch."""
    marks: deque[torch.cuda.Event] = field(default_factory=deque)
    """Ends of the steps that the device may still be working on."""


class VideoWorker:
    """The work of one rank.

    stages: this rank's stage of each expert.  rank: within the gang.  save_state: None on a gang that saves nothing.
    """

    def __init__(
        self,
        stages: tuple[WanStage, ...],
        rank: int,
        device: torch.device,
        transport: Transport,
        save_state: SaveState | None = None,
    ) -> None:
        self._stages, self._rank, self._device, self._transport = stages, rank, device, transport
        self._save_state = save_state
        self._saver = ThreadPoolExecutor(1, thread_name_prefix="solver-state")
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
        mine = [branch for branch in plan.branches if plan.chain(branch) == self._rank // plan.stages]
        conditioning = {
            (expert, branch): self._stages[expert].prepare(tensors[f"text.{branch}"].to(self._device), latents.shape)
            for expert in sorted({step.expert for step in plan.steps})
            for branch in mine
        }
        self._requests[request] = _Request(task, solver, latents, conditioning)

    @torch.inference_mode()
    def run(self, request: int, position: int, digest: int) -> None:
        """This rank's nodes of the plan's step at `position`; queues device work and sends, waits for peers only."""
        state = self._requests[request]
        task, plan = state.task, state.task.plan
        if digest != plan.digest:
            raise RuntimeError(f"job {task.job}: rank 0 walks plan {digest:016x}, rank {self._rank} {plan.digest:016x}")
        step = plan.steps[position]
        chain, index = divmod(self._rank, plan.stages)
        stage = self._stages[step.expert]
        first, last = index == 0, index == plan.stages - 1
        on_solver_rank = self._rank == plan.solver_rank
        predictions: dict[Branch, Tensor] = {}
        mine = [branch for branch in plan.branches if plan.chain(branch) == chain]
        self._take_due(state)
        time = stage.time(state.solver.timesteps[step.index].expand(1)) if mine else None
        for branch in mine:
            assert time is not None
            conditioning = state.conditioning[step.expert, branch]
            if first:
                x = state.latents
            else:
                tokens = (1, conditioning.rotary[0].shape[1], stage.width)
                x = self._transport.recv(tokens, stage.dtype, self._rank - 1, "hidden")
            out = stage(x, conditioning, time)
            if not last:
                self._transport.send(out, self._rank + 1, "hidden")
            elif on_solver_rank:
                predictions[branch] = out
            else:
                self._transport.send(out, plan.solver_rank, "prediction")
        if on_solver_rank:
            self._solve(state, position, predictions)
        elif first and mine and chain and position < len(plan.steps) - 1:
            self._due.append(state)
        if self._device.type == "cuda":
            mark = torch.cuda.Event()
            mark.record()
            state.marks.append(mark)

    def _solve(self, state: _Request, position: int, predictions: dict[Branch, Tensor]) -> None:
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
                self._transport.send(state.latents, rank, "latents")
        if self._save_state and task.checkpoint_every and (final or (step.index + 1) % task.checkpoint_every == 0):
            self._save(state, step.index + 1)

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

    def result(self, request: int) -> Tensor:
        """Rank 0: the request's latents [1, C, F, H, W] fp32 on the CPU, once its last step has been collected."""
        return self._requests[request].latents.cpu()

    def close(self, request: int) -> None:
        """Drop everything the request holds.  Latents still on their way are taken, or the next request would get them."""
        self._take_due(self._requests.pop(request))

    def shutdown(self) -> None:
        """Finish the writes that have begun."""
        self._saver.shutdown(wait=True, cancel_futures=True)

    def _save(self, state: _Request, step: int) -> None:
        tensors, numbers = state.solver.state()
        # Copies on this stream, so the solver may go on; the saver's thread waits for them.
        on_host = {name: self._to_host(x) for name, x in (("latents", state.latents), *tensors.items())}
        copied = torch.cuda.Event() if self._device.type == "cuda" else None
        if copied:
            copied.record()
        save_state, job = self._save_state, state.task.job
        assert save_state is not None

        def write() -> None:
            if copied:
                copied.synchronize()
            latents = on_host.pop("latents")
            save_state(job, SolverState(step, latents, on_host, numbers).to_bytes())

        self._saver.submit(write)

    def _to_host(self, x: Tensor) -> Tensor:
        if x.device.type == "cpu":
            return x  # solver tensors are never written in place
        return torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True)
