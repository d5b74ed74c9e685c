"""What one rank of a gang does for a world: its stage's part of every pass, and on the last rank the sampler.

    noise or latents ──> stage 0 ──hidden──> ... ──> stage P-1 ──flow──> x0, new noise ──latents──> stage 0

Between requests a rank keeps the windows of some worlds.  Which ones, and which keys and values of finished chunks, all
ranks decide alike without asking: they see the same requests in the same order, and their budgets are given for one
block.  So rank 0 answers for the gang (`live`, `kept`).  Where it has changed its mind since it was asked, the request
computes nothing and its report says ``stale``: its sender asks and plans again.

Axes: C latent channels, c latent frames of a chunk, h/w latents, L tokens, D model width.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor

from cache_actors.keys import Key
from deployments.gang.conductor import Result
from deployments.gang.transport import Transport
from deployments.lingbot.camera import control_tensor
from deployments.lingbot.camera_path import CameraPolicy, CameraState, advance_camera
from deployments.lingbot.condition import condition_slice
from deployments.lingbot.controls import ChunkControls
from deployments.lingbot.kv_ring import KVBlob, KVShape
from deployments.lingbot.kv_store import KVStore
from deployments.lingbot.noise import chunk_noise
from deployments.lingbot.sampler import renoise, x0_from_flow
from deployments.lingbot.stage import WorldStage
from deployments.lingbot.stage_session import StageSession
from deployments.lingbot.stream_config import StreamConfig, frame_tokens, latent_size
from deployments.lingbot.world_plan import Pass
from deployments.lingbot.world_task import WorldTask


@dataclass
class _World:
    """A window that outlives its requests."""

    session: StageSession
    keys: list[Key] = field(default_factory=list)
    """Of the chunks in the window's past, a key each."""
    condition: Tensor | None = None
    """Came with the first request; so did each of `texts`."""
    texts: dict[str, Tensor] = field(default_factory=dict)
    """Embeddings [n, text_dim] by prompt."""

    def take(self, task: WorldTask, tensors: Mapping[str, Tensor]) -> bool:
        """Keep what came with a request; whether that and what was here before is all that it needs."""
        self.condition = tensors.get("condition", self.condition)
        came = {prompt: tensors.get(f"text.{number}") for number, prompt in enumerate(task.prompts)}
        known = {prompt: self.texts.get(prompt) if text is None else text for prompt, text in came.items()}
        self.texts = {prompt: text for prompt, text in known.items() if text is not None}
        needed = {task.prompts[chunk.prompt] for chunk in task.chunks}
        return not task.chunks or (self.condition is not None and needed <= self.texts.keys())


@dataclass(eq=False)
class _Request:
    task: WorldTask
    tensors: Mapping[str, Tensor]
    world: _World | None
    """None where the request is stale."""
    blobs: Mapping[int, KVBlob]
    """Held from the start, so that they cannot be dropped in between."""
    camera: CameraState
    """Before the chunk at hand."""
    begun: int | None = None
    """The chunk at hand."""
    latents: Tensor | None = None
    """Of the chunk at hand, on the first and the last rank; on its way while None on rank 0."""
    made: list[Tensor] = field(default_factory=list)
    """Rank 0: final latents of generated chunks, on the CPU."""
    done: list[str] = field(default_factory=list)
    """Passes run, by operation."""


class WorldWorker:
    """The work of one rank; fits `gang.conductor.Worker`.

    max_worlds: windows kept at once, at least the conductor's requests in flight; the least recently used idle ones are
    parked.  kv_bytes_per_block: host memory for keys and values of finished chunks, for each block of the model.
    """

    def __init__(
        self,
        stage: WorldStage,
        stream: StreamConfig,
        camera: CameraPolicy,
        rank: int,
        device: torch.device,
        transport: Transport,
        *,
        max_worlds: int,
        kv_bytes_per_block: int,
    ) -> None:
        self._stage, self._stream, self._policy = stage, stream, camera
        self._rank, self._device, self._transport = rank, device, transport
        self._max_worlds = max_worlds
        self._store = KVStore(kv_bytes_per_block * len(stage.local_blocks), pinned=device.type == "cuda")
        self._worlds: OrderedDict[str, _World] = OrderedDict()
        self._requests: dict[int, _Request] = {}
        self._lock = threading.Lock()

    def reserve(self, height: int, width: int) -> int:
        """Before the first request: host memory for the keys and values of worlds of this size; for how many chunks."""
        stage, config = self._stage, self._stage.config
        shape = KVShape(
            len(stage.local_blocks),
            frame_tokens(height, width),
            config.num_heads,
            config.head_dim,
            stage.dtype,
            self._device,
        )
        return self._store.reserve(shape.blob(self._stream.chunk), stage.dtype)

    # --- rank 0, from any thread -----------------------------------------------------------------------------------

    def live(self, world: str, keys: Sequence[Key]) -> int:
        """Chunks of the path `keys` that the gang's window of a world can go on from; 0 where it has none."""
        with self._lock:
            held = self._worlds.get(world)
            if held is None:
                return 0
            common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(held.keys, keys, strict=False)))
            return common if common == len(held.keys) or held.session.unbroken else 0

    def prompts(self, world: str) -> list[str]:
        """Prompts whose embeddings the gang keeps with the world's window; none where its condition is not kept too."""
        with self._lock:
            held = self._worlds.get(world)
            return [] if held is None or held.condition is None else list(held.texts)

    def kept(self, keys: Sequence[Key]) -> list[bool]:
        """For each chunk, whether every rank has its keys and values."""
        return [self._store.has(key) for key in keys]

    def blob(self, key: Key) -> KVBlob | None:
        """The keys and values that this rank keeps of a chunk; on a GPU the copy to the host may still be running."""
        return self._store.get(key)

    # --- the conductor's thread ------------------------------------------------------------------------------------

    @torch.inference_mode()
    def open(self, request: int, spec: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Prepare a request.  spec: `WorldTask.to_json` under ``task``; tensors: as `WorldTask` says.

        A plan without passes that goes on from nothing parks the world.  One for a world that another request is busy
        with is stale: two would write one window.
        """
        task = WorldTask.from_json(spec["task"])
        passes = task.plan.passes
        if any(state.task.world == task.world for state in self._requests.values()):
            self._requests[request] = _Request(task, tensors, None, {}, task.camera)
            return
        needed = self._stream.needed_chunks(passes[0].chunk) if passes and passes[0].op == "restore" else ()
        blobs = {chunk: self._store.get(bytes.fromhex(task.keys[chunk])) for chunk in needed}
        found = {chunk: blob for chunk, blob in blobs.items() if blob is not None}
        if not passes and task.live == 0:
            with self._lock:
                self._worlds.pop(task.world, None)
            self._requests[request] = _Request(task, tensors, None, {}, task.camera)
            return
        world = self._take_world(task) if len(found) == len(needed) else None
        if world is not None and not world.take(task, tensors):
            world = None
        self._requests[request] = _Request(task, tensors, world, found, task.camera)

    def vetoed(self, request: int) -> bool:
        """Worlds know no step cache."""
        return False

    @torch.inference_mode()
    def run(self, request: int, position: int, digest: int, native: bool = False) -> None:
        """This rank's part of the pass at `position`; queues device work and sends, waits for peers only."""
        state = self._requests[request]
        plan = state.task.plan
        if digest != plan.digest:
            raise RuntimeError(
                f"world {state.task.world}: rank 0 walks plan {digest:016x}, rank {self._rank} {plan.digest:016x}"
            )
        if state.world is None:
            return
        self._transport.settle(request)  # what earlier passes sent is received by the time their receivers began them
        one = plan.passes[position]
        state.done.append(one.op)
        match one.op:
            case "restore":
                self._restore(state, state.world, one.chunk)
            case "denoise":
                self._denoise(request, state, state.world, one)
            case "clean":
                self._clean(request, state, state.world, one.chunk)

    def collect(self, request: int, position: int) -> None:
        """Rank 0: take the latents that a denoise pass gave; the final ones of a chunk go to the CPU at once."""
        state = self._requests[request]
        one = state.task.plan.passes[position]
        if state.world is None or one.op != "denoise":
            return
        if state.latents is None:
            shape = self._latent_shape(state.task)
            state.latents = self._transport.recv(shape, torch.float32, state.task.plan.stages - 1, "latents")
        if one.step == len(self._stream.sampler.timesteps) - 1:
            state.made.append(state.latents.cpu())

    def result(self, request: int) -> Result:
        """Rank 0: latents [1, C, chunks * c, h, w] fp32 of the generated chunks, in order (empty without any).

        The one report: ``stale``, and how many passes of each operation were run.
        """
        state = self._requests[request]
        latents = torch.cat(state.made, dim=2) if state.made else torch.empty(0)
        counts = {op: state.done.count(op) for op in ("restore", "denoise", "clean")}
        return Result(latents, [{"stale": state.world is None, **counts}])

    def close(self, request: int) -> None:
        """Drop the request's state; the world's window stays for its next request.

        A request that ends early leaves a half-made chunk, which the next one overwrites.
        """
        del self._requests[request]
        self._transport.settle(request)

    def shutdown(self) -> None:
        """Nothing is left to finish."""

    # --- inside ----------------------------------------------------------------------------------------------------

    def _take_world(self, task: WorldTask) -> _World | None:
        """The window from which the plan goes on; None where there is none such."""
        with self._lock:
            world = self._worlds.get(task.world)
            if task.live == 0:
                world = self._worlds[task.world] = self._new_world(task)
            elif world is None or [key.hex() for key in world.keys[: task.live]] != list(task.keys[: task.live]):
                return None
            elif len(world.keys) > task.live:
                if not world.session.truncate(task.live):
                    return None
                del world.keys[task.live :]
            self._worlds.move_to_end(task.world)
            return world

    def _new_world(self, task: WorldTask) -> _World:
        busy = {state.task.world for state in self._requests.values()}
        self._worlds.pop(task.world, None)
        while len(self._worlds) >= self._max_worlds:
            idle = next((name for name in self._worlds if name not in busy), None)
            if idle is None:
                raise RuntimeError(f"max_worlds: got {self._max_worlds}, but as many requests are in flight; raise it")
            del self._worlds[idle]
        return _World(StageSession(self._stage, self._stream, task.height, task.width))

    def _restore(self, state: _Request, world: _World, chunks: int) -> None:
        world.session.restore(chunks, state.blobs)
        with self._lock:
            world.keys[:] = [bytes.fromhex(key) for key in state.task.keys[:chunks]]

    def _denoise(self, request: int, state: _Request, world: _World, one: Pass) -> None:
        task, sampler = state.task, self._stream.sampler
        first, last = self._rank == 0, self._rank == task.plan.stages - 1
        self._begin(state, world, one.chunk)
        shape = self._latent_shape(task)
        if one.step == 0 and (first or last):
            state.latents = chunk_noise(task.seed, one.chunk, 0, shape).to(self._device)
        out = world.session.denoise(self._input(state, world, one.chunk), one.step)
        if not last:
            self._transport.send(out, self._rank + 1, "hidden", request)
            if first:
                state.latents = None  # on their way
            return
        assert state.latents is not None
        x = x0_from_flow(state.latents, out, sampler.sigma_x0[one.step])
        if one.step < len(sampler.sigma_noise):
            noise = chunk_noise(task.seed, one.chunk, one.step + 1, shape).to(self._device)
            x = renoise(x, noise, sampler.sigma_noise[one.step])
        state.latents = x
        if not first:
            self._transport.send(x, 0, "latents", request)

    def _clean(self, request: int, state: _Request, world: _World, chunk: int) -> None:
        self._begin(state, world, chunk)
        if self._rank == 0 and (replayed := state.tensors.get(f"latents.{chunk}")) is not None:
            state.latents = replayed.to(self._device)
        out = world.session.clean(self._input(state, world, chunk))
        if out is not None:
            self._transport.send(out, self._rank + 1, "hidden", request)
        key = bytes.fromhex(state.task.keys[chunk])
        room = self._store.room(key, world.session.blob_shape(), self._stage.dtype)
        if room is not None:
            world.session.export(room)
            self._store.put(key, room)
        with self._lock:
            world.keys.append(key)

    def _begin(self, state: _Request, world: _World, chunk: int) -> None:
        """Once a chunk: its prompt, camera and room in the window."""
        if state.begun == chunk:
            return
        task = state.task
        of_chunk = task.chunks[chunk - task.first]
        controls = ChunkControls.from_canonical(of_chunk.controls.encode())
        poses, after = advance_camera(state.camera, controls, chunk == 0, self._policy)
        control = control_tensor(state.camera, poses, chunk == 0, task.height, task.width, self._policy)
        prompt = task.prompts[of_chunk.prompt]
        world.session.set_prompt(prompt, world.texts[prompt])
        world.session.begin(chunk, control)
        state.camera, state.begun = after, chunk

    def _input(self, state: _Request, world: _World, chunk: int) -> Tensor:
        """What this rank's stage works on: embedded latents on the first rank, the hidden state elsewhere."""
        frames, task = self._stream.chunk, state.task
        if self._rank == 0:
            assert state.latents is not None
            assert world.condition is not None  # or the request would be stale
            condition = condition_slice(world.condition, chunk * frames, frames)
            return self._stage.embed(state.latents, condition.to(self._device))
        tokens = frames * frame_tokens(task.height, task.width)
        return self._transport.recv((1, tokens, self._stage.config.dim), torch.float32, self._rank - 1, "hidden")

    def _latent_shape(self, task: WorldTask) -> tuple[int, int, int, int, int]:
        rows, columns = latent_size(task.height, task.width)
        return (1, self._stage.config.out_dim, self._stream.chunk, rows, columns)
