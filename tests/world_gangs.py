"""Runs a gang of world workers over gloo, without Ray, and plays requests to it as a driver would."""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors.torch import load_file, save_file
from torch import Tensor

from app.planning.world_plan import world_plan
from app.planning.world_task import task_tensors, world_task
from cache_actors.keys import Key, path_keys
from deployments.gang.conductor import Submission
from deployments.gang.rank import Rank
from deployments.gang.transport import Transport
from deployments.lingbot.camera_path import CameraPolicy
from deployments.lingbot.checkpoint import load_stage, open_world_checkpoint
from deployments.lingbot.controls import ChunkControls
from deployments.lingbot.fast_forward import ChunkCosts
from deployments.lingbot.session import World
from deployments.lingbot.stream_config import StreamConfig
from deployments.lingbot.world_plan import WorldPlan
from deployments.lingbot.world_worker import WorldWorker
from deployments.wan.checkpoint import split_blocks
from tests.gangs import Waiter


@dataclass(frozen=True)
class WorldGangSpec:
    """A `RankSpec` on the CPU, one thread a rank."""

    folder: str
    stream: StreamConfig
    pp: int
    max_worlds: int = 2
    kv_bytes_per_block: int = 1 << 20
    in_flight: int = 2

    backend = "gloo"
    data_timeout_s = 60.0
    threads = 1

    def device(self, rank: int) -> torch.device:
        return torch.device("cpu")

    def worker(self, rank: int, device: torch.device, transport: Transport) -> WorldWorker:
        checkpoint = open_world_checkpoint(Path(self.folder))
        blocks = split_blocks(checkpoint.config.num_layers, self.pp, None)[rank]
        worker = WorldWorker(
            load_stage(checkpoint, blocks, dtype=torch.float32, device=device),
            self.stream,
            CameraPolicy(),
            rank,
            device,
            transport,
            max_worlds=self.max_worlds,
            kv_bytes_per_block=self.kv_bytes_per_block,
        )
        if rank == 0:
            _WORKERS.append(worker)
        return worker


_WORKERS: list[WorldWorker] = []
"""Rank 0's worker in this process: a test asks it what it keeps, as a replica would."""


@dataclass
class WorldClient:
    """One world, its journal in memory; the part of a driver that a test needs."""

    name: str
    world: World
    stream: StreamConfig
    costs: ChunkCosts
    texts: dict[str, Tensor]
    controls: list[ChunkControls] = field(default_factory=list)
    latents: list[Tensor] = field(default_factory=list)
    plans: list[WorldPlan] = field(default_factory=list)

    def keys(self) -> list[Key]:
        return path_keys(self.world.root, [c.canonical() for c in self.controls])

    def submission(
        self, worker: WorldWorker, stages: int, wanted: Sequence[ChunkControls], waiter: Waiter
    ) -> Submission:
        known = self.keys()
        live = worker.live(self.name, known)
        kept = worker.kept(known)
        plan = world_plan(
            stages=stages, stream=self.stream, costs=self.costs, live=live, kept=kept, generate=len(wanted)
        )
        self.plans.append(plan)
        path = [*self.controls, *wanted]
        task = world_task(self.name, self.world, path, plan, live=live, policy=CameraPolicy())
        tensors = task_tensors(task, self.world.condition, self.texts.__getitem__, self.latents)
        return Submission(self.name, {"task": task.to_json()}, tensors, 0, len(plan.passes), plan.digest, waiter)


@dataclass(frozen=True)
class Act:
    """One request: `chunks` more chunks of a world, after a rewind if `rewind_to` says so."""

    world: int
    chunks: tuple[ChunkControls, ...]
    rewind_to: int | None = None
    at_once: bool = False
    """Together with the next act, which is of another world."""


def play_worlds(
    spec: WorldGangSpec, clients: Sequence[WorldClient], acts: Sequence[Act], tmp_path: Path
) -> dict[str, Tensor]:
    """Plays the acts on a gang of processes; latents by ``<world>.<chunk>``, and counts of passes as ``ops.<act>``."""
    out = tmp_path / f"out-{len(list(tmp_path.iterdir()))}.safetensors"
    arguments = (spec, clients, acts, str(out.with_suffix(".store")), str(out))
    if spec.pp == 1:
        _rank(0, *arguments)
    else:
        multiprocessing.set_forkserver_preload(["tests.world_gangs"])
        mp.start_processes(_rank, arguments, nprocs=spec.pp, start_method="forkserver")
    return load_file(out)


def _rank(
    rank: int, spec: WorldGangSpec, clients: Sequence[WorldClient], acts: Sequence[Act], store: str, out: str
) -> None:
    member = Rank(spec, rank, spec.pp, dist.FileStore(store, spec.pp) if spec.pp > 1 else None)
    member.wait_ready()
    if rank == 0:
        save_file(_drive(member, spec, clients, acts), out)
        member.stop(60)
    else:
        member._thread.join()
    if member.failure is not None:
        raise member.failure


def _drive(member: Rank, spec: WorldGangSpec, clients: Sequence[WorldClient], acts: Sequence[Act]) -> dict[str, Tensor]:
    worker, results = _WORKERS.pop(), dict[str, Tensor]()
    pending: list[tuple[int, Act, Waiter]] = []
    for number, act in enumerate(acts):
        client, waiter = clients[act.world], Waiter()
        if act.rewind_to is not None:
            del client.controls[act.rewind_to :], client.latents[act.rewind_to :]
        member.conductor.submit(client.submission(worker, spec.pp, act.chunks, waiter))
        pending.append((number, act, waiter))
        if act.at_once:
            continue
        for position, done, its_waiter in pending:
            if not its_waiter.ended.wait(120):
                raise TimeoutError(f"act {position} did not end")
            if its_waiter.error is not None:
                raise its_waiter.error
            assert its_waiter.result is not None
            (report,) = its_waiter.result.ranks
            of = clients[done.world]
            counts = [report["stale"], report["restore"], report["denoise"], report["clean"]]
            results[f"ops.{position}"] = torch.tensor(counts)
            if not report["stale"]:
                of.controls += done.chunks
                if done.chunks:
                    of.latents += [x.contiguous() for x in its_waiter.result.latents.split(spec.stream.chunk, dim=2)]
        pending.clear()
    for i, client in enumerate(clients):
        results |= {f"{i}.{chunk}": x.contiguous() for chunk, x in enumerate(client.latents)}
    return results
