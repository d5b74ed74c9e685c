"""One world model in this process, and worlds on it, for jobs that prove or measure: the served parts without Serve.

    WorldSetup ─> LocalWorldModel (gang, text encoder, VAE) ─> LocalWorld: open, adopt, generate, resume, frames

Axes: C latent channels, c latent frames of a chunk, h/w latents, T frames, H/W pixels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import torch
from torch import Tensor

from app.jobs.local_world_gang import LocalWorldGang, LocalWorldRankSpec, local_backend
from app.planning.world_plan import world_plan
from app.planning.world_task import task_tensors, world_task
from cache_actors.keys import Key, WorldMaterial, image_digest, path_keys
from deployments.lingbot.camera_path import CameraPolicy
from deployments.lingbot.checkpoint import VAE_FILE, open_world_checkpoint, world_fingerprints
from deployments.lingbot.condition import encode_condition
from deployments.lingbot.controls import ChunkControls
from deployments.lingbot.fast_forward import ChunkCosts
from deployments.lingbot.journal import JournalEntry
from deployments.lingbot.session import World
from deployments.lingbot.stage_session import session_bytes
from deployments.lingbot.stream_config import STREAMS, StreamConfig
from deployments.lingbot.stream_decoder import DecoderState, StreamDecoder
from deployments.lingbot.text_encoder import WorldTextEncoder, clean_prompt
from deployments.lingbot.vae import load_vae
from deployments.lingbot.world_key import world_material
from deployments.lingbot.world_plan import WorldPlan
from deployments.wan.memory_plan import DTYPES

COSTS = ChunkCosts(generate=0.57, clean=0.12, restore=0.02, decode=0.3, frames=0.05)
"""Seconds at the 1.3B size on one H200; here only their order counts: what is kept is restored, not replayed."""


@dataclass(frozen=True)
class WorldSetup:
    """What is served and how.  Picklable, and the same in every process of a job."""

    folder: Path
    support: Path | None
    dtype: str
    """Of the stages and the text encoder, a name of `memory_plan.DTYPES`; so for the VAE's."""
    vae_dtype: str
    on_gpu: bool
    pp: int
    window: int | None
    """Latent frames; None as the release was made.  So for sink and chunk."""
    sink: int | None
    chunk: int | None
    height: int
    width: int
    max_chunks: int
    """Longest world, for the memory plan."""
    kv_bytes: int
    """Host memory for keys and values of finished chunks."""
    live: int = 1
    """Windows that the gang keeps at once."""
    threads: int = 1
    """Torch threads of a rank on a CPU.  1 splits sums alike in every topology, so that latents are bit-equal."""

    @property
    def device(self) -> torch.device:
        """Of rank 0, the text encoder and the VAE."""
        return torch.device("cuda", 0) if self.on_gpu else torch.device("cpu")


class LocalWorldModel:
    """Loads everything; a context manager that ends the gang."""

    def __init__(self, setup: WorldSetup) -> None:
        torch.set_num_threads(setup.threads)
        self.setup = setup
        self._checkpoint = open_world_checkpoint(setup.folder, setup.support)
        self.stream = _stream(STREAMS[self._checkpoint.layout], setup)
        self.camera = CameraPolicy()
        config = self._checkpoint.config
        support = self._checkpoint.support
        text = WorldTextEncoder(support, config.text_len, DTYPES[setup.dtype], setup.device)
        self._texts: dict[str, Tensor] = {}
        self._conditions: dict[str, Tensor] = {}
        self._encode_text = text.encode
        self._vae = load_vae(support / VAE_FILE, DTYPES[setup.vae_dtype], setup.device)
        self.decoder = StreamDecoder(self._vae)
        layers = -(-config.num_layers // setup.pp)
        window_bytes = session_bytes(
            config, layers, self.stream, setup.height, setup.width, DTYPES[setup.dtype], setup.max_chunks
        )
        self._spec = LocalWorldRankSpec(
            folder=setup.folder,
            support=setup.support,
            stream=self.stream,
            camera=self.camera,
            dtype=setup.dtype,
            pp=setup.pp,
            split=None,
            backend=local_backend(setup.pp, setup.on_gpu),
            data_timeout_s=900.0,
            in_flight=1,
            threads=setup.threads,
            on_gpu=setup.on_gpu,
            max_worlds=setup.live,
            window_bytes=window_bytes,
            kv_bytes=setup.kv_bytes,
            usual_size=(setup.height, setup.width),
        )
        self.gang = LocalWorldGang(self._spec)

    def text(self, prompt: str) -> Tensor:
        """Embeddings [n, text_dim] of a cleaned prompt, computed once."""
        if prompt not in self._texts:
            self._texts[prompt] = self._encode_text(prompt)
        return self._texts[prompt]

    def condition(self, image: Tensor) -> Tensor:
        """[4 + C, 31, h, w] fp32, computed once.  image: [H, W, 3] uint8 RGB."""
        digest = image_digest(image.contiguous().numpy().tobytes(), image.shape[0], image.shape[1])
        if digest not in self._conditions:
            self._conditions[digest] = encode_condition(self._vae, image, self.setup.height, self.setup.width)
        return self._conditions[digest]

    @cached_property
    def _fingerprints(self) -> dict[str, str]:
        return world_fingerprints(self._checkpoint)

    def material(self, image: Tensor, prompt: str, seed: int) -> WorldMaterial:
        """What a world's root key covers.  prompt: cleaned."""
        setup = self.setup
        return world_material(
            self._fingerprints,
            self.stream,
            self.camera,
            device=setup.device,
            dtype=DTYPES[setup.dtype],
            vae_dtype=DTYPES[setup.vae_dtype],
            max_prompt_tokens=self._checkpoint.config.text_len,
            image=image,
            prompt=prompt,
            seed=seed,
            height=setup.height,
            width=setup.width,
        )

    def replace_gang(self) -> None:
        """End the gang and start another, which knows of no world."""
        self.gang.close()
        self.gang = LocalWorldGang(self._spec)

    def close(self) -> None:
        """End the gang."""
        self.gang.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class LocalWorld:
    """One session: the journal is here, its window on the gang.

    name: of the session; the gang keeps the window of the last one that computed something.
    image: [H, W, 3] uint8 RGB.  It is encoded when the first chunk is made or replayed, so a full hit never encodes it.
    """

    def __init__(self, model: LocalWorldModel, name: str, root: Key, image: Tensor, prompt: str, seed: int) -> None:
        self._model, self._name, self._root, self._image = model, name, root, image
        self._prompt, self._seed = clean_prompt(prompt), seed
        self.journal: list[JournalEntry] = []

    @property
    def keys(self) -> list[Key]:
        """Of the journal's chunks."""
        return path_keys(self._root, [entry.controls.canonical() for entry in self.journal])

    def adopt(self, entries: Sequence[JournalEntry]) -> None:
        """Append chunks that were made elsewhere; nothing is computed."""
        self.journal += entries

    def generate(self, controls: ChunkControls, fast_forward: int = 0) -> WorldPlan:
        """Make the next chunk, the window brought to it first; its latents are in the journal.  Returns what was done.

        fast_forward: how many of the known chunks came from a cache with this request.
        """
        plan, latents = self._run([controls], self._model.gang.kept(self.keys), fast_forward)
        self.journal.append(JournalEntry(controls, latents))
        return plan

    def fork(self, name: str, chunks: int) -> LocalWorld:
        """Another session that begins with the first chunks of this one; the gang has no window of it."""
        twin = LocalWorld(self._model, name, self._root, self._image, self._prompt, self._seed)
        twin.adopt(self.journal[:chunks])
        return twin

    def resume(self, *, from_journal: bool = False) -> WorldPlan:
        """Bring the window to the journal's end.  from_journal: as if no keys and values had been kept."""
        kept = [False] * len(self.journal) if from_journal else self._model.gang.kept(self.keys)
        return self._run([], kept, 0)[0]

    @cached_property
    def world(self) -> World:
        """What the session was opened with, its image encoded."""
        setup = self._model.setup
        condition = self._model.condition(self._image)
        return World(self._root, condition, self._prompt, self._seed, setup.height, setup.width)

    def frames(self, chunk: int, state: DecoderState) -> np.ndarray:
        """RGB [T, H, W, 3] uint8 of a chunk, the next one for the decoder's state."""
        return self._model.decoder.decode(self.journal[chunk].latents, state)

    def _run(
        self, wanted: Sequence[ChunkControls], kept: Sequence[bool], fast_forward: int
    ) -> tuple[WorldPlan, Tensor]:
        model = self._model
        live = model.gang.live(self._name, self.keys)
        plan = world_plan(
            stages=model.setup.pp,
            stream=model.stream,
            costs=COSTS,
            live=live,
            kept=kept,
            generate=len(wanted),
            fast_forward=fast_forward,
        )
        if not plan.passes:  # the window is there; such a task would park the world
            return plan, torch.empty(0)
        path = [*(entry.controls for entry in self.journal), *wanted]
        task = world_task(self._name, self.world, path, plan, live=live, policy=model.camera)
        latents = [entry.latents for entry in self.journal]
        result = model.gang.run(task, task_tensors(task, self.world.condition, model.text, latents))
        assert not result.ranks[0]["stale"], "nobody else asks this gang"
        return plan, result.latents


def _stream(release: StreamConfig, setup: WorldSetup) -> StreamConfig:
    return StreamConfig(
        chunk=release.chunk if setup.chunk is None else setup.chunk,
        window=release.window if setup.window is None else setup.window,
        sink=release.sink if setup.sink is None else setup.sink,
        sampler=release.sampler,
        fps=release.fps,
    )
