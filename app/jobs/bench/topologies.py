"""The four topologies on the same weights: one process a rank, without Ray.

For each topology: latency of one request, throughput with more in flight, busy share of each rank, hop time between
stages, what the plan's simulation says, and a digest of every video's latents, to be compared across topologies.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from app.jobs.bench.bench_rank import BenchRankSpec, RankReport
from app.jobs.bench.bench_request import BenchRequest
from app.jobs.bench.comparison import WARM_UP_STEPS
from app.jobs.bench.listener import WaitingListener
from app.jobs.bench.reuse import reused_steps
from deployments.gang.rank import Rank
from deployments.gang.transport import Backend
from deployments.plan import BRANCHES, Branch, Node
from deployments.wan.checkpoint import WanCheckpoint, open_checkpoint

ALL = ((1, 1), (1, 2), (2, 1), (2, 2))
STOP_S = 60.0
WATCHED = 2
"""Request whose steps are searched for waits: the one after the warm-up and before the loads."""


@dataclass(frozen=True)
class TopologySetup:
    """What is the same for every topology of a run."""

    folder: str
    requests: tuple[BenchRequest, ...]
    """One for each shape."""
    loads: tuple[int, ...]
    """Requests in flight, 1 first."""
    dtype: Literal["float32", "bfloat16"]
    compile_blocks: bool
    on_gpu: bool
    threads: int | None
    """Torch threads of each rank on a CPU."""
    reuse: int = 0
    """Steps that the watched request and a timed one reuse; 0: none is timed."""

    @property
    def requests_a_shape(self) -> int:
        """A gang numbers its requests from 1, in the order of submission."""
        return WATCHED + sum(self.loads) + (self.reuse > 0)

    def backend(self, ranks: int) -> Backend:
        """How tensors travel: NCCL where each rank has a GPU of its own."""
        if not self.on_gpu:
            return "gloo"
        return "nccl" if torch.cuda.device_count() >= ranks else "staged"


@dataclass(frozen=True)
class LoadResult:
    """Some requests at once."""

    in_flight: int
    seconds: float
    """From the first submission to the last result."""
    busy: tuple[float, ...]
    """Share of it in which each rank computed."""
    simulated_s: float
    """Makespan of `Plan.simulate` with the stage times measured here and the hop."""
    latents: tuple[str, ...]
    """SHA-256 by seed, 0 first."""


@dataclass(frozen=True)
class TopologyResult:
    """One topology at one shape."""

    pp: int
    cfg: int
    backend: Backend | None
    """None with one rank, which sends nothing."""
    shape: str
    steps: int
    hop_s: float | None
    """None with one rank."""
    stage_s: tuple[float, ...]
    """Mean of one stage call, by rank; 0 for a rank without work."""
    solve_s: float
    """What the solver's rank computes beside its stage, a step."""
    loads: tuple[LoadResult, ...]
    peak_bytes: tuple[int | None, ...]
    """Of all shapes of the run, by rank."""
    syncs: tuple[str, ...]
    """Waits of the host inside the step loop, all ranks."""
    reused_s: float | None = None
    """One request whose step cache predicts some steps, otherwise as the first load; None where none was asked for."""

    @property
    def name(self) -> str:
        """Such as pp2cfg1."""
        return f"pp{self.pp}cfg{self.cfg}"


def parse_topologies(text: str) -> tuple[tuple[int, int], ...]:
    """``all``, or names such as ``pp1cfg1,pp2cfg2``.  Raises ValueError."""
    if text == "all":
        return ALL
    known = {f"pp{pp}cfg{cfg}": (pp, cfg) for pp in range(1, 5) for cfg in (1, 2)}
    unknown = [name for name in text.split(",") if name not in known]
    if unknown:
        raise ValueError(f"topologies: got {unknown}, expected all or of {sorted(known)}, separated by commas")
    return tuple(known[name] for name in text.split(","))


def measure_topology(setup: TopologySetup, pp: int, cfg: int) -> list[TopologyResult]:
    """Start the ranks, run every shape at every load, end them."""
    ranks = pp * cfg
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        arguments = (setup, pp, cfg, scratch)
        mp.start_processes(_rank_process, arguments, nprocs=ranks, start_method="spawn")
        reports = [_read_report(Path(scratch, f"rank-{rank}.json")) for rank in range(ranks)]
        timings = json.loads(Path(scratch, "loads.json").read_text())
    checkpoint = open_checkpoint(setup.folder)
    return [
        topology_result(setup, checkpoint, request, pp, cfg, reports, timings[index])
        for index, request in enumerate(setup.requests)
    ]


def _rank_process(rank: int, setup: TopologySetup, pp: int, cfg: int, scratch: str) -> None:
    ranks = pp * cfg
    spec = BenchRankSpec(
        folder=setup.folder,
        pp=pp,
        cfg=cfg,
        dtype=setup.dtype,
        compile_blocks=setup.compile_blocks,
        in_flight=max(setup.loads),
        on_gpu=setup.on_gpu,
        backend=setup.backend(ranks),
        hop_tokens=tuple(request.shape.tokens for request in setup.requests),
        # A transport through host memory waits for the device by its nature.
        watched=WATCHED if setup.on_gpu and setup.backend(ranks) != "staged" else None,
        on_end=partial(_write_report, Path(scratch, f"rank-{rank}.json")),
        threads=setup.threads,
    )
    store = dist.FileStore(str(Path(scratch, "store")), ranks) if ranks > 1 else None
    member = Rank(spec, rank, ranks, store)
    member.wait_ready()
    if rank == 0:
        checkpoint = open_checkpoint(setup.folder)
        timings = [_run_shape(member, setup, checkpoint, request, pp, cfg) for request in setup.requests]
        Path(scratch, "loads.json").write_text(json.dumps(timings))
        member.stop(STOP_S)
    while member.alive:
        member.stop(STOP_S)
    if member.failure is not None:
        raise member.failure


def _run_shape(
    member: Rank, setup: TopologySetup, checkpoint: WanCheckpoint, request: BenchRequest, pp: int, cfg: int
) -> dict[str, Any]:
    """Warm up, one watched request, then every load, then a request that reuses."""
    reusing = replace(request, reuse=reused_steps(request.steps, setup.reuse))
    _run_load(member, checkpoint, replace(request, steps=min(request.steps, WARM_UP_STEPS)), pp, cfg, 1)
    _run_load(member, checkpoint, reusing, pp, cfg, 1)
    loads = [_run_load(member, checkpoint, request, pp, cfg, load) for load in setup.loads]
    reused_s = _run_load(member, checkpoint, reusing, pp, cfg, 1)["seconds"] if setup.reuse else None
    return {"loads": loads, "reused_s": reused_s}


def _run_load(
    member: Rank, checkpoint: WanCheckpoint, request: BenchRequest, pp: int, cfg: int, load: int
) -> dict[str, Any]:
    plan = request.plan(checkpoint, pp, cfg)
    listeners = [WaitingListener() for _ in range(load)]
    submissions = [
        replace(request, seed=seed).submission(
            f"seed-{seed}", checkpoint, plan, _text(request, checkpoint, seed), listener
        )
        for seed, listener in enumerate(listeners)
    ]
    began = time.perf_counter()
    for submission in submissions:
        member.conductor.submit(submission)
    latents = [listener.wait() for listener in listeners]
    seconds = time.perf_counter() - began
    return {"in_flight": load, "seconds": seconds, "latents": [_digest(x) for x in latents]}


def _text(request: BenchRequest, checkpoint: WanCheckpoint, seed: int) -> dict[Branch, Tensor]:
    """Embeddings drawn from the seed: what they say does not change the speed."""
    generator = torch.Generator().manual_seed(seed)
    size = (1, request.max_sequence_length, checkpoint.transformer_config(checkpoint.experts[0])["text_dim"])
    branches = BRANCHES if request.guidance_scale > 1 else BRANCHES[:1]
    return {branch: torch.randn(size, generator=generator) for branch in branches}


def _digest(latents: Tensor) -> str:
    content = latents.contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(f"{latents.dtype}{tuple(latents.shape)}".encode() + content).hexdigest()


def _write_report(path: Path, report: RankReport) -> None:
    path.write_text(json.dumps(asdict(report)))


def _read_report(path: Path) -> RankReport:
    data = json.loads(path.read_text())
    return RankReport(
        seconds={int(request): activities for request, activities in data["seconds"].items()},
        hop_s={int(tokens): seconds for tokens, seconds in data["hop_s"].items()},
        peak_bytes=data["peak_bytes"],
        syncs=data["syncs"],
    )


def topology_result(
    setup: TopologySetup,
    checkpoint: WanCheckpoint,
    request: BenchRequest,
    pp: int,
    cfg: int,
    reports: Sequence[RankReport],
    timings: Mapping[str, Any],
) -> TopologyResult:
    """What the ranks' reports and rank 0's timings of one shape come to.

    timings: ``loads``, each with ``in_flight``, ``seconds`` and ``latents``; ``reused_s``.
    """
    plan = request.plan(checkpoint, pp, cfg)
    first = 1 + setup.requests.index(request) * setup.requests_a_shape + WATCHED
    numbers = iter(range(first, first + sum(setup.loads)))
    by_load = [[next(numbers) for _ in range(load)] for load in setup.loads]
    # Stage times come from the lone request: with several in flight on one GPU, kernels of two ranks share it.
    alone = by_load[0]
    stage_s = [_mean(report, alone, "stage") for report in reports]
    computed = [_busy_s(report, alone) for report in reports]
    solver = reports[plan.solver_rank]
    calls, staged = _sum(solver, alone, "stage")
    solve_s = max(0.0, computed[plan.solver_rank] - staged) / len(plan.steps) if calls else 0.0
    hop_s = reports[0].hop_s.get(request.shape.tokens)

    def seconds(node: Node) -> float:
        return solve_s if node.op == "solve" else stage_s[node.rank]

    return TopologyResult(
        pp=pp,
        cfg=cfg,
        backend=setup.backend(pp * cfg) if pp * cfg > 1 else None,
        shape=str(request.shape),
        steps=request.steps,
        hop_s=hop_s,
        stage_s=tuple(stage_s),
        solve_s=solve_s,
        loads=tuple(
            LoadResult(
                in_flight=timing["in_flight"],
                seconds=timing["seconds"],
                busy=tuple(_busy_s(report, members) / timing["seconds"] for report in reports),
                simulated_s=plan.simulate(seconds, hop=hop_s or 0.0, requests=timing["in_flight"]).makespan,
                latents=tuple(timing["latents"]),
            )
            for timing, members in zip(timings["loads"], by_load, strict=True)
        ),
        peak_bytes=tuple(report.peak_bytes for report in reports),
        syncs=tuple(place for report in reports for place in report.syncs),
        reused_s=timings["reused_s"],
    )


def _sum(report: RankReport, requests: Sequence[int], activity: Literal["run", "stage", "wait"]) -> tuple[int, float]:
    found = [report.seconds[request].get(activity, (0, 0.0)) for request in requests if request in report.seconds]
    return sum(count for count, _ in found), sum(seconds for _, seconds in found)


def _mean(report: RankReport, requests: Sequence[int], activity: Literal["run", "stage", "wait"]) -> float:
    count, seconds = _sum(report, requests, activity)
    return seconds / count if count else 0.0


def _busy_s(report: RankReport, requests: Sequence[int]) -> float:
    """A rank's steps without its waits for peers."""
    return _sum(report, requests, "run")[1] - _sum(report, requests, "wait")[1]


def latents_agree(results: Sequence[TopologyResult]) -> bool:
    """Whether every seed gave the same bits in every topology and load of one shape."""
    by_seed: dict[int, set[str]] = {}
    for result in results:
        for load in result.loads:
            for seed, digest in enumerate(load.latents):
                by_seed.setdefault(seed, set()).add(digest)
    return all(len(digests) == 1 for digests in by_seed.values())


def format_topologies(results: Sequence[TopologyResult]) -> str:
    """A table of one shape.  speed-up: requests a second over those of the first topology with one in flight."""
    base = results[0].loads[0].seconds
    lines = [
        f"{results[0].shape}, {results[0].steps} steps; speed-up against {results[0].name} with one request",
        f"{'':9}{'backend':>8}{'in flight':>10}{'seconds':>9}{'speed-up':>9}{'simulated':>10}{'ratio':>7}"
        f"{'hop ms':>8}  busy by rank",
    ]
    for result in results:
        hop = "" if result.hop_s is None else f"{result.hop_s * 1e3:.2f}"
        for load in result.loads:
            busy = " ".join(f"{share:.2f}" for share in load.busy)
            lines.append(
                f"{result.name:9}{result.backend or '':>8}{load.in_flight:10}{load.seconds:9.3f}"
                f"{load.in_flight * base / load.seconds:9.2f}{load.simulated_s:10.3f}"
                f"{load.seconds / load.simulated_s:7.2f}{hop:>8}  {busy}"
            )
    for result in results:
        if result.reused_s is not None:
            share = result.reused_s / result.loads[0].seconds
            lines.append(f"{result.name:9}with reused steps: {result.reused_s:.3f} s, {share:.3f} of it")
    equal = "equal bits" if latents_agree(results) else "DIFFER"
    lines.append(f"latents of every seed over topologies and loads: {equal}")
    watched = [result for result in results if result.backend != "staged" and result.peak_bytes[0] is not None]
    if watched:
        found = sorted({place for result in watched for place in result.syncs})
        lines.append(f"waits of the host inside the step loop: {', '.join(found) if found else 'none'}")
    return "\n".join(lines)
