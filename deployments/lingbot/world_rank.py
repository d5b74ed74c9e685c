"""A rank of a gang that serves a world model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from deployments.gang.transport import Backend, Transport
from deployments.lingbot.camera_path import CameraPolicy
from deployments.lingbot.checkpoint import load_stage, open_world_checkpoint
from deployments.lingbot.stream_config import StreamConfig
from deployments.lingbot.world_worker import WorldWorker
from deployments.wan.checkpoint import split_blocks
from deployments.wan.free_memory import free_memory
from deployments.wan.memory_plan import DTYPES, GIB, ModelTooBig


@dataclass(frozen=True)
class WorldRankSpec:
    """What every rank of a world gang is made from.  Implements `RankSpec`."""

    folder: Path
    support: Path | None
    stream: StreamConfig
    camera: CameraPolicy
    dtype: str
    """Of `memory_plan.DTYPES`."""
    pp: int
    split: tuple[int, ...] | None
    backend: Backend
    data_timeout_s: float
    in_flight: int
    threads: int
    on_gpu: bool
    max_worlds: int
    """Windows kept at once."""
    window_bytes: int
    """Of the largest window on the largest stage."""
    kv_bytes: int
    """Host memory for keys and values of finished chunks, of all blocks of the model together."""
    usual_size: tuple[int, int] | None = None
    """Height and width in pixels of worlds for which that memory is made ready at the start; None: when it is needed.

    Only a gang with GPUs has anything to make ready.
    """

    def device(self, rank: int) -> torch.device:
        """The GPU that Ray gave this process, or the CPU."""
        if not self.on_gpu:
            return torch.device("cpu")
        if not torch.cuda.is_available():
            raise RuntimeError(f"rank {rank}: configured for a GPU, but torch sees none; check ranks.gpus and CUDA")
        return torch.device("cuda", 0)

    def worker(self, rank: int, device: torch.device, transport: Transport) -> WorldWorker:
        """Read this rank's blocks and nothing else.  Raises ModelTooBig before anything is loaded."""
        checkpoint = open_world_checkpoint(self.folder, self.support)
        layers = checkpoint.config.num_layers
        blocks = split_blocks(layers, self.pp, self.split)[rank]
        weights = checkpoint.stage_bytes(
            blocks, first=blocks.start == 0, last=blocks.stop == layers, dtype=DTYPES[self.dtype]
        )
        needed, free = weights + self.max_worlds * self.window_bytes, free_memory(device)
        if needed > free:
            raise ModelTooBig(
                f"rank {rank}: needs {needed / GIB:.2f} GiB ({weights / GIB:.2f} of weights, {self.max_worlds} windows "
                f"of {self.window_bytes / GIB:.2f}), {device} has {free / GIB:.2f} free; lower sessions.live, "
                "limits.max_pixels or limits.max_chunks, or raise topology.pp"
            )
        worker = WorldWorker(
            load_stage(checkpoint, blocks, dtype=DTYPES[self.dtype], device=device),
            self.stream,
            self.camera,
            rank,
            device,
            transport,
            max_worlds=self.max_worlds,
            kv_bytes_per_block=self.kv_bytes // layers,
        )
        if self.usual_size is not None:
            worker.reserve(*self.usual_size)
        return worker
