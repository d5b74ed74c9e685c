"""Keys and values of one session on one stage: a window over latent frames whose first frames stay for ever.

Layout after F frames with window W and sink S: frames 0..F-1 while F <= W, then 0..S-1 and the last W - S, in order.
Keys are stored after rotation by their absolute frame, so a finished frame's keys and values never change and do not
depend on their slot.  The order is kept on restore: another order would change the sums of attention.

    begin(chunk)     once a chunk: drops what falls out of the window and makes room; again: nothing
    write(...)       every pass of the chunk overwrites the same slots; the last one, of clean latents, stays

Axes: 1 batch, N tokens, H heads, E channels of a head.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from deployments.lingbot.stream_config import StreamConfig

KVBlob = Tensor
"""One chunk's keys and values of a stage, [layers, 2, chunk tokens, H, E]: keys, then values.  Never written to."""


@dataclass(frozen=True)
class KVShape:
    """What the keys and values of one stage look like."""

    layers: int
    frame_tokens: int
    """Tokens of a latent frame."""
    heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    def frame_bytes(self) -> int:
        """Bytes of one latent frame, all layers."""
        return 2 * self.layers * self.frame_tokens * self.heads * self.head_dim * self.dtype.itemsize

    def blob(self, frames: int) -> tuple[int, ...]:
        """Shape of a `KVBlob` of so many latent frames."""
        return (self.layers, 2, frames * self.frame_tokens, self.heads, self.head_dim)


class KVRing:
    """The window of every block of a stage.  All blocks move together, so there is one pair of counters."""

    def __init__(self, shape: KVShape, stream: StreamConfig) -> None:
        self._shape, self._stream = shape, stream
        self._frames = 0
        self._held = 0
        frames = stream.window if stream.window != -1 else 2 * stream.chunk
        self._keys = [self._empty(frames) for _ in range(shape.layers)]
        self._values = [self._empty(frames) for _ in range(shape.layers)]

    @property
    def frames(self) -> int:
        """Frames of the world up to the current chunk's end."""
        return self._frames

    @property
    def held(self) -> int:
        """Frames in the window."""
        return self._held

    @property
    def unbroken(self) -> bool:
        """Whether nothing has been dropped since the start."""
        return self._held == self._frames

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return sum(x.nbytes for x in (*self._keys, *self._values))

    def begin(self, chunk: int) -> None:
        """Make room for a chunk, the one after the last or the last one again."""
        size = self._stream.chunk
        if self._frames == (chunk + 1) * size:
            return
        if self._frames != chunk * size:
            raise ValueError(f"chunk: got {chunk} after {self._frames} frames, expected {self._frames // size}")
        if self._stream.window == -1:
            self._grow(self._held + size)
        else:
            self._evict(self._held + size - self._stream.window)
        self._held += size
        self._frames += size

    def write(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store the chunk's keys (rotated) and values [1, N, H, E]; returns the window's, the chunk included."""
        tokens = self._shape.frame_tokens
        end = self._held * tokens
        start = end - self._stream.chunk * tokens
        self._keys[layer][:, start:end] = key
        self._values[layer][:, start:end] = value
        return self._keys[layer][:, :end], self._values[layer][:, :end]

    def window(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer in their order, [1, held tokens, H, E]; not to be written to."""
        end = self._held * self._shape.frame_tokens
        return self._keys[layer][:, :end], self._values[layer][:, :end]

    def blob_shape(self) -> tuple[int, ...]:
        """Of a chunk's blob."""
        return self._shape.blob(self._stream.chunk)

    def export_chunk(self, out: Tensor) -> None:
        """Copy the newest chunk's keys and values to a `KVBlob`; does not wait for the copy where `out` is pinned."""
        start = (self._held - self._stream.chunk) * self._shape.frame_tokens
        for layer in range(self._shape.layers):
            key, value = self.window(layer)
            out[layer, 0].copy_(key[0, start:], non_blocking=True)
            out[layer, 1].copy_(value[0, start:], non_blocking=True)

    @classmethod
    def restored(cls, shape: KVShape, stream: StreamConfig, chunks: int, blobs: Mapping[int, KVBlob]) -> KVRing:
        """The ring after so many chunks, as far as any later chunk can see it.

        blobs: by chunk, those of `StreamConfig.needed_chunks`, on any device.  Frames that the next chunk drops before
        it attends are left zero.  Raises KeyError for a missing chunk, ValueError for a misshapen blob.
        """
        ring = cls(shape, stream)
        ring._frames, ring._held = chunks * stream.chunk, stream.held_frames(chunks)
        if stream.window == -1:
            ring._grow(ring._held)
        size = stream.chunk
        slot_of = {stream.frame_of_slot(chunks, slot): slot for slot in range(ring._held)}
        for chunk in stream.needed_chunks(chunks):
            blob = blobs[chunk]
            if blob.shape != ring.blob_shape() or blob.dtype != shape.dtype:
                raise ValueError(
                    f"keys and values of chunk {chunk}: got {list(blob.shape)} {blob.dtype}, expected "
                    f"{list(ring.blob_shape())} {shape.dtype}"
                )
            for frame in range(chunk * size, (chunk + 1) * size):
                if frame in slot_of:
                    ring._copy_frame(blob, frame % size, slot_of[frame])
        return ring

    def truncate(self, chunks: int) -> bool:
        """Go back to the end of an earlier chunk unless something has been dropped; False, unchanged, if it has."""
        frames = chunks * self._stream.chunk
        if not self.unbroken or frames > self._frames:
            return False
        self._frames = self._held = frames
        return True

    def clone(self) -> KVRing:
        """An independent copy."""
        twin = KVRing.__new__(KVRing)
        twin._shape, twin._stream, twin._frames, twin._held = self._shape, self._stream, self._frames, self._held
        twin._keys, twin._values = [k.clone() for k in self._keys], [v.clone() for v in self._values]
        return twin

    def _empty(self, frames: int) -> Tensor:
        s = self._shape
        return torch.zeros(1, frames * s.frame_tokens, s.heads, s.head_dim, dtype=s.dtype, device=s.device)

    def _evict(self, frames: int) -> None:
        """Drop the oldest frames after the sink."""
        if frames <= 0:
            return
        tokens = self._shape.frame_tokens
        to, start, end = (n * tokens for n in (self._stream.sink, self._stream.sink + frames, self._held))
        for buffer in (*self._keys, *self._values):
            # The copy between overlapping slots goes through a clone.
            buffer[:, to : to + end - start] = buffer[:, start:end].clone()
        self._held -= frames

    def _grow(self, frames: int) -> None:
        """At least double: growing is then rare, and each session's size follows its length."""
        have = self._keys[0].shape[1] // self._shape.frame_tokens
        if frames <= have:
            return
        for buffers in (self._keys, self._values):
            for layer, old in enumerate(buffers):
                buffers[layer] = self._empty(max(frames, 2 * have))
                buffers[layer][:, : old.shape[1]] = old

    def _copy_frame(self, blob: KVBlob, frame_in_chunk: int, slot: int) -> None:
        tokens = self._shape.frame_tokens
        source = slice(frame_in_chunk * tokens, (frame_in_chunk + 1) * tokens)
        target = slice(slot * tokens, (slot + 1) * tokens)
        for layer in range(self._shape.layers):
            self._keys[layer][0, target].copy_(blob[layer, 0, source], non_blocking=True)
            self._values[layer][0, target].copy_(blob[layer, 1, source], non_blocking=True)
