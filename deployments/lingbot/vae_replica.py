"""The VAE of a world model as a Serve deployment: images to conditions, latents to frames chunk by chunk.

It keeps the decoder's state of some worlds, each named by the last chunk decoded.  A caller whose chunk does not follow
on it hears ``cold`` and sends the latents that rebuild the state, so any replica can decode any chunk of any world.

Axes: C latent channel, F latent frames, h/w latents, T frames, H/W pixels.
"""

from __future__ import annotations

import asyncio
import io
import time
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypedDict

import imageio.v3 as iio
import numpy as np
import torch
from safetensors.torch import load, save

from deployments.lingbot.condition import encode_condition
from deployments.lingbot.process_name import process_name
from deployments.lingbot.stream_decoder import DecoderState, StreamDecoder
from deployments.lingbot.vae import load_vae
from deployments.storage import Storage
from deployments.video_file import frames_npz

RECENT_CHUNKS = 8
"""Decoded chunks whose frames stay in memory, for whoever asks for them as images."""

ImageKind = Literal["jpeg", "png"]


class Decoded(TypedDict):
    """Reply of `WorldVaeReplica.decode`."""

    cold: bool
    """Nothing was decoded: the state is not here, and no latents came to rebuild it from."""
    warmed: bool
    """The state was rebuilt first."""
    frames: int
    seconds: float


@dataclass
class _Held:
    key: str
    """The last chunk decoded."""
    state: DecoderState


class WorldVaeReplica:
    """Encoder and decoder.  vae_file: of the release.  max_states: worlds whose decoder state is kept at once."""

    def __init__(
        self, vae_file: Path, dtype: torch.dtype, on_gpu: bool, threads: int, storage: Storage, max_states: int
    ) -> None:
        self._device_thread = ThreadPoolExecutor(1, thread_name_prefix="world-vae")
        self._files = ThreadPoolExecutor(2, thread_name_prefix="world-files")
        self._storage, self._max_states = storage, max_states
        self._states: OrderedDict[str, _Held] = OrderedDict()
        self._recent: OrderedDict[str, np.ndarray] = OrderedDict()
        self._storing: dict[str, Future[None]] = {}
        device = torch.device("cuda" if on_gpu else "cpu")

        def load_both() -> None:
            torch.set_num_threads(threads)
            self._vae = load_vae(vae_file, dtype, device)
            self._decoder = StreamDecoder(self._vae)

        self._device_thread.submit(load_both).result()
        self._device = process_name(device, threads)

    async def device(self) -> str:
        """As `process_name` gives it."""
        return self._device

    async def condition(self, image: np.ndarray, height: int, width: int) -> bytes:
        """A safetensors blob with ``condition`` [4 + C, 31, h, w] fp32.  image: RGB [H, W, 3] uint8 of any size."""

        def encode() -> bytes:
            pixels = torch.from_numpy(np.array(image))  # a copy: what comes from the object store is read-only
            return save({"condition": encode_condition(self._vae, pixels, height, width).contiguous()})

        return await asyncio.get_running_loop().run_in_executor(self._device_thread, encode)

    async def decode(
        self,
        world: str,
        parent: str,
        key: str,
        position: int,
        latents: bytes,
        warm: bytes | None,
        fps: int,
        file: str,
    ) -> Decoded:
        """Decode a world's next chunk; its frames are stored as `file`, which `stored` waits for.

        parent, key: names of the chunk before and of this one.  position: latents before this chunk.  latents: a
        safetensors blob with ``latents`` [1, C, F, h, w].  warm: one with the last of those before `position`, as many
        as `StreamDecoder.warm` wants; None: go on from the state that is here.
        """
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(
            self._device_thread, self._decode, world, parent, key, position, latents, warm, fps, file
        )

    async def stored(self, file: str) -> None:
        """Until a decoded chunk's frames are stored; returns at once for a file that is not being written here."""
        writing = self._storing.get(file)
        if writing is not None:
            await asyncio.wrap_future(writing)

    async def images(self, file: str, kind: ImageKind) -> list[bytes]:
        """A decoded chunk's frames, each as a file of this kind.  Raises ObjectNotFound where they are not stored."""
        return await asyncio.get_running_loop().run_in_executor(self._files, self._images, file, kind)

    async def forget(self, world: str) -> None:
        """Let a world's state go."""
        self._states.pop(world, None)

    def _decode(
        self, world: str, parent: str, key: str, position: int, latents: bytes, warm: bytes | None, fps: int, file: str
    ) -> Decoded:
        began, held = time.perf_counter(), self._states.get(world)
        if position == 0:
            state = self._decoder.start()
        elif held is not None and held.key == parent:
            state = held.state
        elif warm is not None:
            state = self._decoder.warm(load(warm)["latents"], position)
        else:
            return Decoded(cold=True, warmed=False, frames=0, seconds=0.0)
        warmed = position > 0 and (held is None or held.key != parent)
        frames = self._decoder.decode(load(latents)["latents"], state)
        self._states[world] = _Held(key, state)
        self._states.move_to_end(world)
        while len(self._states) > self._max_states:
            self._states.popitem(last=False)
        self._recent[file] = frames
        while len(self._recent) > RECENT_CHUNKS:
            self._recent.popitem(last=False)
        writing = self._storing[file] = self._files.submit(self._store, file, frames, fps)
        writing.add_done_callback(lambda _: self._storing.pop(file, None))
        return Decoded(cold=False, warmed=warmed, frames=len(frames), seconds=time.perf_counter() - began)

    def _store(self, file: str, frames: np.ndarray, fps: int) -> None:
        self._storage.put_bytes(frames_npz(frames, fps), file)

    def _images(self, file: str, kind: ImageKind) -> list[bytes]:
        frames = self._recent.get(file)
        if frames is None:
            frames = np.load(io.BytesIO(self._storage.read_bytes(file)))["frames"]
        # Level 1: level 6 takes three times as long for a tenth fewer bytes.
        options: dict[str, Any] = {"quality": 92} if kind == "jpeg" else {"compress_level": 1}
        return [iio.imwrite("<bytes>", frame, extension=f".{kind}", **options) for frame in frames]
