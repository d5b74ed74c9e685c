"""The gates of the chosen schedule in each topology, on calibration videos.

Quality is measured on all videos once a split: a second chain of stages changes no bit (a branch is computed alone,
tests/unit/deployments/wan/test_step_cache_in_gang.py), and the timed pairs check that again in every topology, latent
by latent.  Latency is measured in every topology, on rank processes of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from pydantic import Field
from tqdm import tqdm

from app.jobs.calibrate.candidate_run import CandidateRecord
from app.jobs.calibrate.settings import CalibrationSettings
from app.jobs.calibrate.studio import Studio
from app.jobs.local_gang import LocalGang, LocalRankSpec
from app.jobs.paired_runs import PairedRuns
from app.jobs.video_pair import TimedPair, gate_values, latency_interval, latency_ratio
from deployments.stage_cache.closed import Closed
from deployments.stage_cache.evidence import TopologyResult
from deployments.stage_cache.profile import Profile, topology_name
from deployments.wan.checkpoint import open_checkpoint
from deployments.wan.decoder import VideoDecoder
from deployments.wan.memory_plan import DTYPES
from deployments.wan.text_encoder import TextEncoder
from deployments.wan.video_rank import StageCaching

ANCHOR_BUDGET = 64 << 30
"""Bytes; the jobs run one request at a time, so the budget is never the limit."""


class TimedTopology(Closed):
    """Latency of one topology and what was checked on the way: a row of gates.json."""

    topology: str
    pairs: tuple[TimedPair, ...]
    latency_ratio: float
    latency_interval: tuple[float, float] = Field(description="95 % bootstrap interval.")
    guard_trips: int
    native_bits_equal: bool | None = Field(description="Latents of the gang against those of collection.")
    hits: dict[str, int] = Field(description="Reused steps by `stage branch`, all pairs.")


def time_topology(settings: CalibrationSettings, run: Path, profile: Profile, pp: int, cfg: int) -> TimedTopology:
    """Run the timing pairs in one gang."""
    videos = settings.videos()[: settings.timing_pairs]
    studio = Studio(settings.studio(run), 0)
    checkpoint, clip, device = studio.checkpoint, settings.clip, studio.device
    encoder = TextEncoder(checkpoint.folder, DTYPES[settings.dtype], device)
    decoder = VideoDecoder(checkpoint.folder, torch.float32, device)
    reuse = profile.planned(_changes(profile, settings)).schedule.reuse
    pairs, trips, equal, hits = [], 0, True, dict[str, int]()
    with LocalGang(rank_spec(settings, profile, pp, cfg)) as gang:
        runs = PairedRuns(gang, (pp, cfg), checkpoint, clip, encoder, decoder)
        for paired in tqdm(runs.pairs(videos, reuse), total=len(videos), desc=topology_name(pp, cfg), unit="pair"):
            pairs.append(paired.pair)
            trips += paired.trips
            video = videos[len(pairs) - 1]
            equal = equal and torch.equal(paired.native.latents, studio.native(video)[1])
            for count in paired.hits():
                key = f"{count.stage} {count.branch}"
                hits[key] = hits.get(key, 0) + count.hits
    return TimedTopology(
        topology=topology_name(pp, cfg),
        pairs=tuple(pairs),
        latency_ratio=latency_ratio(pairs),
        latency_interval=latency_interval(pairs),
        guard_trips=trips,
        native_bits_equal=equal,
        hits=hits,
    )


def topology_results(
    profile: Profile, finals: dict[int, CandidateRecord], timed: Sequence[TimedTopology]
) -> tuple[TopologyResult, ...]:
    """The gates of every topology of the profile.  finals: records of all videos, by number of stages."""
    by_name = {row.topology: row for row in timed}
    results = []
    for partition in profile.partitions:
        pp = len(partition.stages)
        for cfg in profile.cfg:
            name = topology_name(pp, cfg)
            values = gate_values(finals[pp].videos, by_name[name].latency_ratio)
            results.append(TopologyResult(topology=name, gates=values, junit_sha256=None))
    return tuple(results)


def rank_spec(settings: CalibrationSettings, profile: Profile, pp: int, cfg: int) -> LocalRankSpec:
    """The ranks of one topology with the profile mounted."""
    caching = StageCaching(profile, ANCHOR_BUDGET)
    return LocalRankSpec(settings.checkpoint, settings.revision, settings.dtype, pp, cfg, settings.on_gpu, caching)


def _changes(profile: Profile, settings: CalibrationSettings) -> tuple[float, ...]:
    from app.jobs.calibrate.fits import timestep_changes

    return timestep_changes(open_checkpoint(settings.checkpoint, settings.revision), settings.clip, settings.signal)
