"""A rank of a gang that serves a Wan text-to-video model."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch

from deployments.gang.transport import Backend, Transport
from deployments.stage_cache.anchors import AnchorStore
from deployments.stage_cache.profile import Profile
from deployments.stage_cache.step_cache import StepCache
from deployments.storage import Storage
from deployments.wan.checkpoint import open_checkpoint, split_blocks
from deployments.wan.free_memory import free_memory
from deployments.wan.memory_plan import DTYPES, MemoryPlan
from deployments.wan.stage_loading import load_stages
from deployments.wan.video_worker import VideoWorker


def store(storage: Storage, key: str, data: bytes) -> None:
    """Replace what is stored under a key."""
    storage.put_bytes(data, key)


@dataclass(frozen=True)
class StageCaching:
    """The step cache of a gang: each rank takes its stage's share of the profile."""

    profile: Profile
    budget_bytes: int
    """Residuals one rank may hold."""

    def build(self, split: tuple[int, ...], stage: int, device: torch.device) -> StepCache:
        """Of one rank."""
        part = self.profile.partition(split).stages[stage]
        return StepCache(part.predictor, AnchorStore(self.budget_bytes), device, self.profile.error_limits(part))


@dataclass(frozen=True)
class VideoRankSpec:
    """What every rank of a video gang is made from.  Implements `RankSpec`."""

    checkpoint: str
    revision: str | None
    dtype: Literal["float32", "bfloat16"]
    compile_blocks: bool
    pp: int
    cfg: int
    split: tuple[int, ...] | None
    backend: Backend
    data_timeout_s: float
    in_flight: int
    threads: int
    on_gpu: bool
    memory: MemoryPlan
    """A rank that finds less free memory on its GPU refuses to load."""
    step_cache: StageCaching | None
    storage_url: str
    """Where solver states are saved."""

    def device(self, rank: int) -> torch.device:
        """The GPU that Ray gave this process, or the CPU."""
        if not self.on_gpu:
            return torch.device("cpu")
        if not torch.cuda.is_available():
            raise RuntimeError(f"rank {rank}: configured for a GPU, but torch sees none; check ranks.gpus and CUDA")
        return torch.device("cuda", 0)

    def worker(self, rank: int, device: torch.device, transport: Transport) -> VideoWorker:
        """Read this rank's blocks of every expert and nothing else."""
        if device.type == "cuda":
            self.memory.refuse_if_too_big({f"rank {rank}": free_memory(device)})
        checkpoint = open_checkpoint(self.checkpoint, self.revision)
        index = rank % self.pp
        split = split_blocks(checkpoint.num_blocks, self.pp, self.split)
        stages = load_stages(checkpoint, split[index], DTYPES[self.dtype], device, compile_blocks=self.compile_blocks)
        save = partial(store, Storage(self.storage_url))
        caching = self.step_cache
        cache = caching.build(tuple(len(part) for part in split), index, device) if caching else None
        return VideoWorker(stages, rank, device, transport, save, cache)
