"""Latency of one topology on rank processes of its own, and the check that its bits are those of the other runs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from pydantic import Field
from tqdm import tqdm

from app.jobs.calibrate.studio import Studio
from app.jobs.local_gang import LocalGang, LocalRankSpec
from app.jobs.paired_runs import PairedRuns
from app.jobs.prompt_set import Video
from app.jobs.video_pair import TimedPair, latency_interval, latency_ratio
from deployments.stage_cache.closed import Closed
from deployments.stage_cache.profile import Profile, topology_name
from deployments.stage_cache.skip_schedule import Schedule
from deployments.wan.decoder import VideoDecoder
from deployments.wan.memory_plan import DTYPES
from deployments.wan.text_encoder import TextEncoder
from deployments.wan.video_rank import StageCaching

ANCHOR_BUDGET = 64 << 30
"""Bytes; the jobs run one request at a time, so the budget is never the limit."""


class TimedTopology(Closed):
    """Pairs of one topology and what was checked on the way."""

    topology: str
    pairs: tuple[TimedPair, ...]
    latency_ratio: float
    latency_interval: tuple[float, float] = Field(description="95 % bootstrap interval.")
    guard_trips: int
    different_bits: tuple[str, ...] = Field(
        description="Videos whose native or cached latents are not those of the single process, bit for bit."
    )
    hits: dict[str, int] = Field(description="Reused steps by `stage branch`, all pairs.")


def time_topology(
    studio: Studio,
    videos: Sequence[Video],
    profile: Profile,
    schedule: Schedule,
    topology: tuple[int, int],
    threads: int,
) -> TimedTopology:
    """Run native and cached requests of `videos` in one gang.

    studio: has kept native and cached latents of the videos.  topology: pp and cfg.  threads: torch threads of text
    encoder and decoder on a CPU; ranks have those of the studio.
    """
    spec, checkpoint, device = studio.spec, studio.checkpoint, studio.device
    pp, cfg = topology
    if not spec.on_gpu:
        torch.set_num_threads(threads)
    encoder = TextEncoder(checkpoint.folder, DTYPES[spec.dtype], device)
    decoder = VideoDecoder(checkpoint.folder, torch.float32, device)
    ranks = LocalRankSpec(
        spec.checkpoint, spec.revision, spec.dtype, pp, cfg, spec.on_gpu, StageCaching(profile, ANCHOR_BUDGET)
    )
    pairs: list[TimedPair] = []
    different: list[str] = []
    trips, hits = 0, dict[str, int]()
    with LocalGang(ranks) as gang:
        runs = PairedRuns(gang, topology, checkpoint, spec.clip, encoder, decoder).pairs(videos, schedule.reuse)
        bar = tqdm(zip(videos, runs, strict=True), total=len(videos), desc=topology_name(pp, cfg), unit="pair")
        for video, paired in bar:
            pairs.append(paired.pair)
            trips += paired.trips
            native, cached = studio.native(video)[1], studio.cached(video, pp, schedule)
            if not (torch.equal(paired.native.latents, native) and torch.equal(paired.cached.latents, cached)):
                different.append(video.name)
            for count in paired.hits():
                key = f"{count.stage} {count.branch}"
                hits[key] = hits.get(key, 0) + count.hits
    return TimedTopology(
        topology=topology_name(pp, cfg),
        pairs=tuple(pairs),
        latency_ratio=latency_ratio(pairs),
        latency_interval=latency_interval(pairs),
        guard_trips=trips,
        different_bits=tuple(different),
        hits=hits,
    )
