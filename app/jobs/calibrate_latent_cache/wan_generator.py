"""Videos for the calibration: a whole Wan checkpoint in this process, through the worker that serves."""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Literal

import torch

from app.jobs.calibrate_latent_cache.damage import Frames
from app.planning.step_cache_policy import StepCachePolicy
from app.planning.video_plan import video_plan
from deployments.gang.transport import Alone
from deployments.wan.checkpoint import WanCheckpoint
from deployments.wan.decoder import VideoDecoder
from deployments.wan.memory_plan import DTYPES
from deployments.wan.solver_spec import SolverSpec
from deployments.wan.solver_state import SolverState, restarted_state
from deployments.wan.stage_loading import load_stages
from deployments.wan.text_encoder import TextEncoder
from deployments.wan.video_rank import StageCaching
from deployments.wan.video_task import VideoTask
from deployments.wan.video_worker import VideoWorker

_RESIDUALS_BYTES = 16 << 30
"""More than one run's residuals take."""
_STATE_WAIT_S = 60.0
"""For the worker's thread that hands states over."""


class WanGenerator:
    """Implements `VideoGenerator`.  guidance: of each expert.  latent_shape: (1, C, F, H, W).

    step_cache: of every run, as on a server that has one.
    """

    def __init__(
        self,
        checkpoint: WanCheckpoint,
        solver: SolverSpec,
        *,
        latent_shape: tuple[int, int, int, int, int],
        guidance: tuple[float, float],
        negative_prompt: str,
        max_sequence_length: int,
        dtype: Literal["float32", "bfloat16"],
        device: torch.device,
        step_cache: StepCachePolicy | None = None,
    ) -> None:
        self._solver, self._shape, self._guidance = solver, latent_shape, guidance
        self._negative, self._length = negative_prompt, max_sequence_length
        kind = DTYPES[dtype]
        stages = load_stages(checkpoint, range(checkpoint.num_blocks), kind, device)
        self._text = TextEncoder(Path(checkpoint.folder), kind, device)
        self._decoder = VideoDecoder(Path(checkpoint.folder), torch.float32, device)
        self._states: dict[int, SolverState] = {}
        self._arrived = threading.Condition()
        self._step_cache = step_cache
        caching = None
        if step_cache is not None:
            whole = (checkpoint.num_blocks,)
            caching = StageCaching(step_cache.profile, _RESIDUALS_BYTES).build(whole, 0, device)
        self._worker = VideoWorker(stages, 0, device, Alone(), self._keep, caching)

    def cold(self, prompt: str, seed: int, keep: Collection[int]) -> tuple[Frames, Mapping[int, object]]:
        """See `VideoGenerator`."""
        with self._arrived:
            self._states.clear()
        frames = self._run(prompt, seed, None, every=1 if keep else 0)
        with self._arrived:
            if not self._arrived.wait_for(lambda: set(keep) <= set(self._states), _STATE_WAIT_S):
                raise RuntimeError(f"states of steps {sorted(set(keep) - set(self._states))} did not arrive")
            return frames, {step: self._states[step].latents for step in keep}

    def resumed(self, prompt: str, step: int, latents: object) -> Frames:
        """See `VideoGenerator`."""
        assert isinstance(latents, torch.Tensor)
        return self._run(prompt, 0, restarted_state(step, latents, self._solver), every=0)

    def close(self) -> None:
        """End the worker's thread."""
        self._worker.shutdown()

    def _keep(self, key: str, data: bytes) -> None:
        state = SolverState.from_bytes(data)
        with self._arrived:
            self._states[state.step] = state
            self._arrived.notify_all()

    def _run(self, prompt: str, seed: int, resume: SolverState | None, every: int) -> Frames:
        start = resume.step if resume else 0
        plan = video_plan(
            stages=1,
            chains=1,
            guidance_scale=self._guidance[0],
            experts=self._solver.experts(),
            start=start,
            reuse=self._reuse(start),
        )
        text = self._text.encode(prompt, self._negative if "negative" in plan.branches else None, self._length)
        tensors = {f"text.{branch}": x for branch, x in text.items()}
        task = VideoTask("calibration", plan, self._solver, self._shape, seed, self._guidance, every)
        spec: dict[str, Any] = {"task": task.to_json(), "resume": None}
        if resume is not None:
            spec["resume"] = {"step": resume.step, "numbers": dict(resume.numbers)}
            tensors["latents"] = resume.latents
        worker = self._worker
        worker.open(0, spec, tensors)
        try:
            native = False
            for position in range(len(plan.steps)):
                native = native or worker.vetoed(0)
                worker.run(0, position, plan.digest, native)
                worker.collect(0, position)
            latents = worker.result(0).latents
        finally:
            worker.close(0)
        return self._decoder.decode(latents, threading.Event())

    def _reuse(self, start: int) -> tuple[int, ...]:
        policy = self._step_cache
        if policy is None:
            return ()
        return (policy.profile.resumed(policy.schedule, start) if start else policy.schedule).reuse
