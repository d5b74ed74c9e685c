"""The gates of the chosen schedule in each topology.

Quality is measured on all videos once a split: a second chain of stages changes no bit (a branch is computed alone,
tests/unit/deployments/wan/test_step_cache_in_gang.py).  Every timed pair of every topology is compared bit for bit with
that measurement, and a difference stops the job.  Latency is measured in every topology.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from app.jobs.timed_topology import TimedTopology
from app.jobs.video_pair import PairQuality, gate_values
from deployments.stage_cache.evidence import TopologyResult
from deployments.stage_cache.profile import Profile, topology_name


class TopologyDiffers(RuntimeError):
    """The bits of a topology are not those that its quality was measured on."""


def gate_pairs(quality: Sequence[PairQuality], timed: TimedTopology) -> Sequence[PairQuality]:
    """The pairs that speak for a topology: its own if all of them were run in it, else those of its split."""
    if len(timed.pairs) == len(quality):
        return [pair.quality for pair in timed.pairs]
    if timed.different_bits:
        raise TopologyDiffers(
            f"{timed.topology}: videos {list(timed.different_bits)} differ from the single process, so its quality has "
            f"to be measured in it; time all {len(quality)} pairs"
        )
    return quality


def topology_results(
    profile: Profile, quality: Mapping[int, Sequence[PairQuality]], timed: Mapping[str, TimedTopology]
) -> tuple[TopologyResult, ...]:
    """The gates of every topology of the profile.  quality: all videos, by number of stages.  timed: by name."""
    results = []
    for partition in profile.partitions:
        pp = len(partition.stages)
        for cfg in profile.cfg:
            row = timed[topology_name(pp, cfg)]
            values = gate_values(gate_pairs(quality[pp], row), row.latency_ratio)
            results.append(TopologyResult(topology=row.topology, gates=values, junit_sha256=None))
    return tuple(results)
