"""One session on one stage: its window, its prompt's keys and values, and the chunk at hand.

    begin ──> denoise x 4 ──> clean        a chunk
    begin ──> clean                        a chunk whose latents are known (replay)

Any rank's failure leaves a half-made chunk; beginning the same chunk again overwrites it.

Axes as in `stage`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from deployments.lingbot.dit_config import DiTConfig
from deployments.lingbot.kv_ring import KVBlob, KVRing, KVShape
from deployments.lingbot.rope import rotary_table
from deployments.lingbot.sampler_tables import CLEAN_TIMESTEP
from deployments.lingbot.stage import ChunkInputs, TextKV, WorldStage
from deployments.lingbot.stream_config import StreamConfig, frame_tokens


@dataclass
class _Chunk:
    index: int
    inputs: ChunkInputs


class StageSession:
    """What a stage holds for one session.  height, width: pixels."""

    def __init__(self, stage: WorldStage, stream: StreamConfig, height: int, width: int) -> None:
        self._stage, self._stream = stage, stream
        config = stage.config
        self._shape = KVShape(
            len(stage.local_blocks),
            frame_tokens(height, width),
            config.num_heads,
            config.head_dim,
            stage.dtype,
            stage.device,
        )
        self._ring = KVRing(self._shape, stream)
        self._prompt: str | None = None
        self._text: TextKV = ()
        self._chunk: _Chunk | None = None

    @property
    def stage(self) -> WorldStage:
        """The weights."""
        return self._stage

    @property
    def nbytes(self) -> int:
        """Bytes on the device, the chunk at hand left out."""
        return self._ring.nbytes + sum(x.nbytes for pair in self._text for x in pair)

    def set_prompt(self, prompt: str, text: Tensor) -> None:
        """The prompt from the next pass on; the window keeps what it saw under earlier ones.

        text: [n, text_dim]; the same prompt again costs nothing.
        """
        if prompt != self._prompt:
            self._text, self._prompt = self._stage.text_kv(text), prompt

    def begin(self, chunk: int, control: Tensor) -> None:
        """Start a chunk: make room in the window and embed the camera.  control: [1, 384, c, h, w]."""
        if self._prompt is None:
            raise RuntimeError("a chunk was begun before the session had a prompt")
        rows, columns = control.shape[3] // 2, control.shape[4] // 2
        grid = (self._stream.chunk, rows, columns)
        table = rotary_table(chunk * self._stream.chunk, grid, self._stage.config.head_dim)
        inputs = self._stage.chunk_inputs(control, table)
        self._ring.begin(chunk)
        self._chunk = _Chunk(chunk, inputs)

    def denoise(self, hidden: Tensor, step: int) -> Tensor:
        """This stage's part of one denoise step; hidden state [1, L, D] in, the same out, or the flow."""
        time = self._stage.time(self._stream.sampler.timesteps[step])
        return self._stage(hidden, time, self._inputs, self._text, self._ring)

    def clean(self, hidden: Tensor) -> Tensor | None:
        """This stage's part of the clean pass, which ends the chunk; None on the last stage."""
        return self._stage.write_kv(hidden, self._stage.time(CLEAN_TIMESTEP), self._inputs, self._text, self._ring)

    @property
    def _inputs(self) -> ChunkInputs:
        if self._chunk is None:
            raise RuntimeError("no chunk has been begun")
        return self._chunk.inputs

    def blob_shape(self) -> tuple[int, ...]:
        """Of `export`."""
        return self._ring.blob_shape()

    def export(self, out: Tensor) -> None:
        """Copy the finished chunk's keys and values to host memory; see `KVRing.export_chunk`."""
        self._ring.export_chunk(out)

    def restore(self, chunks: int, blobs: Mapping[int, KVBlob]) -> None:
        """Put the window where it was after so many chunks; what was there stays if a blob is missing or wrong."""
        self._ring = KVRing.restored(self._shape, self._stream, chunks, blobs)

    @property
    def unbroken(self) -> bool:
        """Whether `truncate` can go back to any earlier chunk."""
        return self._ring.unbroken

    def truncate(self, chunks: int) -> bool:
        """See `KVRing.truncate`."""
        return self._ring.truncate(chunks)

    def fork(self) -> StageSession:
        """An independent copy between two chunks."""
        twin = StageSession.__new__(StageSession)
        twin._stage, twin._stream, twin._shape = self._stage, self._stream, self._shape
        twin._ring, twin._prompt, twin._text, twin._chunk = self._ring.clone(), self._prompt, self._text, None
        return twin


def session_bytes(
    config: DiTConfig, blocks: int, stream: StreamConfig, height: int, width: int, dtype: torch.dtype, chunks: int
) -> int:
    """Device bytes that a stage of so many blocks needs for a session of at most so many chunks.

    A global window (-1) grows by doubling: the last growth has the old and the new one in memory, at most three times
    what is in use.  A bounded one is allocated whole; twice for the moment of a restore or a fork.
    """
    shape = KVShape(blocks, frame_tokens(height, width), config.num_heads, config.head_dim, dtype, torch.device("meta"))
    frames = stream.held_frames(chunks) * 3 if stream.window == -1 else stream.window * 2
    text = 2 * blocks * config.text_len * config.dim * dtype.itemsize
    return frames * shape.frame_bytes() + text
