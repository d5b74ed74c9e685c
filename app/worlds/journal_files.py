"""Where a world's files are in the storage, and the durable half of its journal: condition and latents.

<world>/condition.safetensors     the image as the model is given it
<world>/<key>.safetensors         a chunk's controls and latents, `JournalEntry`
<world>/<key>.npz                 its frames, once they have been decoded; can be made again from the latents
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from safetensors.torch import load, save
from torch import Tensor

from deployments.lingbot.journal import JournalEntry
from deployments.lingbot.stream_config import WARM_LATENTS
from deployments.storage import Storage


def frames_file(world: str, key: str) -> str:
    """Of a chunk's frames."""
    return f"{world}/{key}.npz"


class JournalFiles:
    """Reads and writes them; blocks for the storage, from any thread."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage

    def put_condition(self, world: str, blob: bytes) -> None:
        """blob: safetensors with ``condition``."""
        self._storage.put_bytes(blob, f"{world}/condition.safetensors")

    def condition(self, world: str) -> Tensor:
        """[4 + C, 31, h, w] fp32."""
        return load(self._storage.read_bytes(f"{world}/condition.safetensors"))["condition"]

    def put(self, world: str, key: str, entry: bytes) -> None:
        """entry: of `JournalEntry.to_bytes`."""
        self._storage.put_bytes(entry, f"{world}/{key}.safetensors")

    def read(self, world: str, key: str) -> bytes:
        """Inverse of `put`; its tensor is ``latents``."""
        return self._storage.read_bytes(f"{world}/{key}.safetensors")

    def latents(self, world: str, key: str) -> Tensor:
        """[1, C, c, h, w] fp32."""
        return JournalEntry.from_bytes(self.read(world, key)).latents

    def warm_latents(self, world: str, keys: Sequence[str], chunk: int) -> bytes:
        """The last latents of a path that a decoder's state is rebuilt from, as a safetensors blob with ``latents``.

        keys: of the whole path, at least one chunk.  chunk: latent frames of each.
        """
        needed = min(len(keys) * chunk, WARM_LATENTS)
        chunks = -(-needed // chunk)
        parts = [self.latents(world, key) for key in keys[-chunks:]]
        return save({"latents": torch.cat(parts, dim=2)[:, :, -needed:].contiguous()})

    def put_frames(self, world: str, key: str, frames: bytes) -> None:
        """frames: of `video_file.frames_npz`."""
        self._storage.put_bytes(frames, frames_file(world, key))

    def read_frames(self, world: str, key: str) -> bytes:
        """Inverse of `put_frames`."""
        return self._storage.read_bytes(frames_file(world, key))

    def has_frames(self, world: str, key: str) -> bool:
        """Whether they are stored."""
        return self._storage.exists(frames_file(world, key))

    def copy(self, source: str, target: str, keys: Sequence[str]) -> None:
        """Give another world the condition and these chunks, with their frames where they are stored."""
        names = ["condition.safetensors", *(f"{key}.safetensors" for key in keys)]
        names += [f"{key}.npz" for key in keys if self.has_frames(source, key)]
        for name in names:
            self._storage.put_bytes(self._storage.read_bytes(f"{source}/{name}"), f"{target}/{name}")

    def drop(self, world: str, keys: Sequence[str]) -> None:
        """Remove chunks; absent ones are what is wanted."""
        for key in keys:
            self._storage.delete(f"{world}/{key}.safetensors")
            self._storage.delete(frames_file(world, key))

    def drop_world(self, world: str) -> None:
        """Remove all of a world's files."""
        self._storage.delete_prefix(world)
