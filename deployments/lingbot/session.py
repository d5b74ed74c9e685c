"""A world session without Ray: the journal is the truth, live state on the stages is a cache of it.

    generate   makes the next chunk and appends it            adopt     appends one that is known from elsewhere
    rewind     drops the last chunks of the journal           fork      copies the journal, up to any chunk
    park       drops the live state; the next generate brings it back the cheapest exact way

Whatever the order of these, a chunk's latents are the same bits as in an uninterrupted world with the same controls.

Axes: C latent channels, c latent frames of a chunk, h/w latents.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cache_actors.keys import Key, node_key
from deployments.lingbot.camera import control_tensor
from deployments.lingbot.camera_path import CameraPolicy, CameraState, advance_camera
from deployments.lingbot.condition import condition_slice
from deployments.lingbot.controls import ChunkControls
from deployments.lingbot.fast_forward import ChunkCosts, cheapest_catch_up
from deployments.lingbot.journal import JournalEntry
from deployments.lingbot.kv_store import KVStore
from deployments.lingbot.noise import chunk_noise
from deployments.lingbot.sampler import renoise, x0_from_flow
from deployments.lingbot.stage import WorldStage
from deployments.lingbot.stage_session import StageSession
from deployments.lingbot.stream_config import StreamConfig, latent_size


@dataclass(frozen=True)
class WorldEngine:
    """All stages of a model in this process, first to last, and what sessions share."""

    stages: tuple[WorldStage, ...]
    stores: tuple[KVStore, ...]
    """Keys and values of finished chunks, one store a stage."""
    stream: StreamConfig
    camera: CameraPolicy
    costs: ChunkCosts
    encode_text: Callable[[str], Tensor]
    """A cleaned prompt to its embeddings [n, text_dim]."""


@dataclass(frozen=True, eq=False)
class World:
    """What a session is opened with; its root key stands for all of it."""

    root: Key
    condition: Tensor
    """[4 + C, 31, h, w] fp32, of `encode_condition`."""
    prompt: str
    seed: int
    height: int
    width: int
    """Pixels."""


@dataclass(frozen=True)
class Receipt:
    """How a chunk came about."""

    chunk: int
    restored: int | None
    """The window was restored after so many chunks; None: not restored."""
    replayed: int
    """Clean passes of earlier chunks."""


class WorldSession:
    """One user's world."""

    def __init__(self, engine: WorldEngine, world: World, journal: Sequence[JournalEntry] = ()) -> None:
        self._engine, self._world = engine, world
        self._journal: list[JournalEntry] = []
        self._keys: list[Key] = []
        self._cameras = [CameraState()]
        self._live: list[StageSession] | None = None
        self._live_chunks = 0
        for entry in journal:
            self.adopt(entry)

    @property
    def journal(self) -> tuple[JournalEntry, ...]:
        """All chunks so far."""
        return tuple(self._journal)

    @property
    def keys(self) -> tuple[Key, ...]:
        """Node key of every chunk."""
        return tuple(self._keys)

    @property
    def live_bytes(self) -> int:
        """Bytes on the stages' devices; 0 while parked."""
        return sum(part.nbytes for part in self._live or ())

    def next_key(self, controls: ChunkControls) -> Key:
        """The node key that the next chunk would have, to look for it before it is made."""
        return node_key(self._keys[-1] if self._keys else self._world.root, controls.canonical())

    def adopt(self, entry: JournalEntry) -> None:
        """Append a chunk made elsewhere under `next_key` of its controls.  Nothing is computed."""
        chunk = len(self._journal)
        entry.controls.check(chunk, self._engine.stream.chunk)
        if tuple(entry.latents.shape) != self._latent_shape():
            raise ValueError(f"latents: got {list(entry.latents.shape)}, expected {list(self._latent_shape())}")
        self._append(entry)

    @torch.inference_mode()
    def generate(self, controls: ChunkControls) -> Receipt:
        """Make the next chunk; its latents are `journal[-1].latents`.

        Raises ValueError for controls of the wrong length.  After any error the session is where it was.
        """
        chunk = len(self._journal)
        controls.check(chunk, self._engine.stream.chunk)
        restored, replayed = self._catch_up()
        parts = self._begin(chunk, controls)
        sampler, shape = self._engine.stream.sampler, self._latent_shape()
        device = parts[-1].stage.device
        x = chunk_noise(self._world.seed, chunk, 0, shape).to(device)
        for step, sigma in enumerate(sampler.sigma_x0):
            hidden = self._embed(parts, chunk, x)
            for part in parts:
                hidden = part.denoise(hidden, step)
            x = x0_from_flow(x, hidden, sigma)
            if step < len(sampler.sigma_noise):
                noise = chunk_noise(self._world.seed, chunk, step + 1, shape).to(device)
                x = renoise(x, noise, sampler.sigma_noise[step])
        self._clean(parts, chunk, x)
        self._append(JournalEntry(controls, x.cpu()))
        self._live_chunks = chunk + 1
        self._keep(parts, chunk)
        return Receipt(chunk, restored, replayed)

    def rewind(self, chunks: int) -> None:
        """Go back to the first `chunks` chunks."""
        self._check_boundary(chunks)
        del self._journal[chunks:], self._keys[chunks:], self._cameras[chunks + 1 :]
        if self._live is not None and self._live_chunks > chunks:
            if all(part.truncate(chunks) for part in self._live):  # the stages' windows move alike
                self._live_chunks = chunks
            else:
                self.park()

    def fork(self, chunks: int) -> WorldSession:
        """An independent session that begins with the first `chunks` chunks; it takes a copy of a live state there."""
        self._check_boundary(chunks)
        twin = WorldSession(self._engine, self._world, self._journal[:chunks])
        if self._live is not None and self._live_chunks <= chunks:
            twin._live, twin._live_chunks = [part.fork() for part in self._live], self._live_chunks
        return twin

    def park(self) -> None:
        """Free the stages' memory; only the journal stays."""
        self._live, self._live_chunks = None, 0

    @torch.inference_mode()
    def resume(self) -> Receipt:
        """Bring the live state to the journal's end now, before a chunk is asked for."""
        restored, replayed = self._catch_up()
        return Receipt(len(self._journal), restored, replayed)

    def _append(self, entry: JournalEntry) -> None:
        _, camera = advance_camera(self._cameras[-1], entry.controls, not self._journal, self._engine.camera)
        self._keys.append(self.next_key(entry.controls))
        self._cameras.append(camera)
        self._journal.append(entry)

    def _catch_up(self) -> tuple[int | None, int]:
        """Bring the live state to the journal's end; returns what was restored and how many chunks were replayed."""
        engine, target = self._engine, len(self._journal)
        kept = [all(store.has(key) for store in engine.stores) for key in self._keys]
        way = cheapest_catch_up(self._live_chunks, target, kept, engine.stream, engine.costs)
        if way.restore is not None:
            blobs = [self._blobs(store, way.restore) for store in engine.stores]
            live = self._new_live()
            for part, of_stage in zip(live, blobs, strict=True):
                part.restore(way.restore, of_stage)
            self._live, self._live_chunks = live, way.restore
        elif self._live is None:
            self._live, self._live_chunks = self._new_live(), 0
        for chunk in range(way.start, target):
            parts = self._begin(chunk, self._journal[chunk].controls)
            self._clean(parts, chunk, self._journal[chunk].latents)
            self._live_chunks = chunk + 1
            self._keep(parts, chunk)
        return way.restore, target - way.start

    def _blobs(self, store: KVStore, boundary: int) -> dict[int, Tensor]:
        blobs = {chunk: store.get(self._keys[chunk]) for chunk in self._engine.stream.needed_chunks(boundary)}
        return {chunk: blob for chunk, blob in blobs.items() if blob is not None}

    def _new_live(self) -> list[StageSession]:
        world = self._world
        return [StageSession(stage, self._engine.stream, world.height, world.width) for stage in self._engine.stages]

    def _begin(self, chunk: int, controls: ChunkControls) -> list[StageSession]:
        assert self._live is not None
        world, policy = self._world, self._engine.camera
        before = self._cameras[chunk]
        poses, _ = advance_camera(before, controls, chunk == 0, policy)
        control = control_tensor(before, poses, chunk == 0, world.height, world.width, policy)
        prompt = self._prompt(chunk) if controls.prompt is None else controls.prompt
        text = self._engine.encode_text(prompt)
        for part in self._live:
            part.set_prompt(prompt, text)
            part.begin(chunk, control)
        return self._live

    def _prompt(self, chunk: int) -> str:
        """The prompt in force before a chunk's own controls."""
        given = [e.controls.prompt for e in self._journal[:chunk] if e.controls.prompt is not None]
        return given[-1] if given else self._world.prompt

    def _embed(self, parts: Sequence[StageSession], chunk: int, latents: Tensor) -> Tensor:
        stage, frames = parts[0].stage, self._engine.stream.chunk
        condition = condition_slice(self._world.condition, chunk * frames, frames)
        return stage.embed(latents.to(stage.device), condition.to(stage.device))

    def _clean(self, parts: Sequence[StageSession], chunk: int, latents: Tensor) -> None:
        hidden: Tensor | None = self._embed(parts, chunk, latents)
        for part in parts:
            assert hidden is not None  # only the last stage returns None
            hidden = part.clean(hidden)

    def _keep(self, parts: Sequence[StageSession], chunk: int) -> None:
        for part, store in zip(parts, self._engine.stores, strict=True):
            room = store.room(self._keys[chunk], part.blob_shape(), part.stage.dtype)
            if room is not None:
                part.export(room)
                store.put(self._keys[chunk], room)

    def _latent_shape(self) -> tuple[int, int, int, int, int]:
        rows, columns = latent_size(self._world.height, self._world.width)
        return (1, self._engine.stages[0].config.out_dim, self._engine.stream.chunk, rows, columns)

    def _check_boundary(self, chunks: int) -> None:
        if not 0 <= chunks <= len(self._journal):
            raise ValueError(f"chunks: got {chunks}, expected 0 to {len(self._journal)}, the chunks of this world")
