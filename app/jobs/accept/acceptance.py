"""The acceptance run: unseen videos, native and cached, four gates in each topology.

    quality   36 pairs a split in one process; what a gang computes bit for bit, see `calibration_gates`
    timing    pairs of whole requests in a gang of every topology, each compared with the above bit for bit
    record    JUnit, detail, sheets, and acceptance.json beside the frozen profile

An interrupted run goes on where it stopped; what has been measured is not measured again, so nothing can be picked.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter

from app.jobs.accept.junit import junit
from app.jobs.accept.preconditions import Acceptable
from app.jobs.accept.video_sheet import SheetRow, three_frames, write_sheet
from app.jobs.calibrate.calibration_gates import gate_pairs, topology_results
from app.jobs.calibrate.candidate_run import CachedVideo, RunCached
from app.jobs.calibrate.studio import TEXTS, Studio, StudioSpec, write_texts
from app.jobs.calibrate.workers import Workers
from app.jobs.prompt_set import Video
from app.jobs.provenance import Provenance
from app.jobs.timed_topology import TimedTopology, time_topology
from app.jobs.video_pair import PairQuality
from deployments.stage_cache.evidence import Evidence
from deployments.stage_cache.frozen_profile import ACCEPTANCE
from deployments.stage_cache.profile import Profile, topology_name
from deployments.stage_cache.skip_schedule import Schedule

SHEET_ROWS = 12
QUALITY = "quality.jsonl"
_PAIRS = TypeAdapter(dict[str, dict[int, CachedVideo]])
"""By name of the video and number of stages."""


@dataclass(frozen=True)
class AcceptVideo:
    """A `Task`: one video native, and cached on every split."""

    video: Video
    profile: Profile
    schedule: Schedule

    def __call__(self, studio: Studio) -> dict[int, CachedVideo]:
        """By number of stages."""
        chain, prepared = studio.chain(1), studio.prepared(1, self.video.prompt)
        latents = chain.run(prepared, self.video.seed).latents
        studio.save_native(self.video, latents, studio.decode(latents))
        found = {}
        for partition in self.profile.partitions:
            predictors = tuple(stage.predictor for stage in partition.stages)
            limits = tuple(self.profile.error_limits(stage) for stage in partition.stages)
            run = RunCached(self.video, self.schedule, predictors, limits, keep=True)
            found[len(predictors)] = run(studio)
        return found


@dataclass(frozen=True)
class Tiles:
    """A `Task`: the sheet tiles of one video on `pp` stages, from what was kept."""

    video: Video
    pp: int
    schedule: Schedule

    def __call__(self, studio: Studio) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        """Native and cached."""
        cached = studio.decode(studio.cached(self.video, self.pp, self.schedule))
        return three_frames(studio.native(self.video)[0]), three_frames(cached)


class Acceptance:
    """One run.  out: its folder; folder: the frozen profile's."""

    def __init__(
        self,
        acceptable: Acceptable,
        schedule: Schedule,
        spec: StudioSpec,
        folder: Path,
        workers: int,
        timing_pairs: int,
        decoder_threads: int,
    ) -> None:
        self._what, self._schedule, self._spec, self._folder = acceptable, schedule, spec, folder
        self._count, self._timing_pairs, self._decoder_threads = workers, timing_pairs, decoder_threads
        self._out = spec.run
        self._out.mkdir(parents=True, exist_ok=True)

    def measure_quality(self) -> None:
        """Run the pairs that have not been run."""
        done = self._pairs()
        todo = [video for video in self._what.prompts.videos() if video.name not in done]
        if not todo:
            return
        with self._workers() as workers, (self._out / QUALITY).open("a") as file:
            tasks = [AcceptVideo(video, self._what.profile, self._schedule) for video in todo]
            for index, runs in workers.map(tasks, "quality"):
                file.write(_PAIRS.dump_json({todo[index].name: runs}).decode() + "\n")
                file.flush()

    def quality(self) -> dict[int, list[CachedVideo]]:
        """All pairs by number of stages, in the order of the videos; KeyError for one that has not been run."""
        done = self._pairs()
        return {
            len(part.stages): [done[video.name][len(part.stages)] for video in self._what.prompts.videos()]
            for part in self._what.profile.partitions
        }

    def _pairs(self) -> dict[str, dict[int, CachedVideo]]:
        path = self._out / QUALITY
        lines = path.read_text().splitlines() if path.exists() else []
        return {name: runs for line in lines for name, runs in _PAIRS.validate_json(line).items()}

    def timing(self, topologies: Sequence[tuple[int, int]]) -> dict[str, TimedTopology]:
        """All that have been timed so far, those of `topologies` among them."""
        path = self._out / "timed.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        timed = {row.topology: row for row in map(TimedTopology.model_validate_json, lines)}
        videos = self._what.prompts.videos()[: self._timing_pairs]
        for pp, cfg in topologies:
            if topology_name(pp, cfg) not in timed:
                studio = Studio(self._spec, 0)
                row = time_topology(
                    studio, videos, self._what.profile, self._schedule, (pp, cfg), self._decoder_threads
                )
                timed[row.topology] = row
                with path.open("a") as file:
                    file.write(row.model_dump_json() + "\n")
                print(f"{row.topology}: ratio {row.latency_ratio:.4f}, 95 % {row.latency_interval}", flush=True)
        return timed

    def record(
        self, quality: dict[int, list[CachedVideo]], timed: dict[str, TimedTopology], where: Provenance
    ) -> Evidence:
        """Write everything; once this is done the prompts are spent, passed or failed."""
        profile, prompts = self._what.profile, self._what.prompts
        pairs: dict[int, Sequence[PairQuality]] = {pp: [r.quality for r in runs] for pp, runs in quality.items()}
        results = []
        for result in topology_results(profile, pairs, timed):
            row = timed[result.topology]
            content = junit(result.topology, result.gates, _properties(row, quality[int(result.topology[2])]))
            (self._out / f"junit-{result.topology}.xml").write_bytes(content)
            results.append(result.model_copy(update={"junit_sha256": hashlib.sha256(content).hexdigest()}))
        self._sheets(sorted(quality))
        self._detail(quality, timed)
        evidence = Evidence(
            kind="acceptance",
            profile_sha256=profile.digest,
            prompts_sha256=prompts.digest,
            seeds=prompts.seeds,
            topologies=tuple(results),
            **where.model_dump(),
        )
        (self._folder / ACCEPTANCE).write_text(evidence.model_dump_json(indent=1) + "\n")
        return evidence

    def _sheets(self, pipelines: Sequence[int]) -> None:
        videos = self._what.prompts.videos()
        with self._workers() as workers:
            for pp in pipelines:
                tiles = workers.all([Tiles(video, pp, self._schedule) for video in videos], f"sheet pp{pp}")
                rows = [SheetRow(v.prompt, *pair) for v, pair in zip(videos, tiles, strict=True)]
                for start in range(0, len(rows), SHEET_ROWS):
                    name = f"sheet-pp{pp}-{start // SHEET_ROWS + 1}.png"
                    write_sheet(self._out / name, rows[start : start + SHEET_ROWS])

    def _detail(self, quality: dict[int, list[CachedVideo]], timed: dict[str, TimedTopology]) -> None:
        detail = {
            topology: {
                "latency_ratio": row.latency_ratio,
                "latency_interval": row.latency_interval,
                "timed_pairs": [pair.model_dump(mode="json") for pair in row.pairs],
                "different_bits": row.different_bits,
                "videos": [
                    pair.model_dump(mode="json")
                    for pair in gate_pairs([run.quality for run in quality[int(topology[2])]], row)
                ],
                "reused": _hits(quality[int(topology[2])]),
                "guard_trips": sum(run.trips for run in quality[int(topology[2])]),
            }
            for topology, row in sorted(timed.items())
        }
        (self._out / "acceptance-detail.json").write_text(json.dumps(detail, indent=1) + "\n")

    def _workers(self) -> Workers:
        if not (self._out / TEXTS).exists():
            write_texts(self._spec, [prompt.text for prompt in self._what.prompts.prompts])
        return Workers(self._spec, self._count)


def _properties(row: TimedTopology, runs: Sequence[CachedVideo]) -> dict[str, str]:
    return {
        "timed_pairs": str(len(row.pairs)),
        "latency_interval_95": f"{row.latency_interval[0]!r} to {row.latency_interval[1]!r}",
        "guard_trips": str(sum(run.trips for run in runs)),
        **{f"reused, stage {name}": str(count) for name, count in _hits(runs).items()},
    }


def _hits(runs: Sequence[CachedVideo]) -> dict[str, int]:
    """Reused steps of all videos by `stage branch`."""
    total = Counter[str]()
    for run in runs:
        for count in run.hits:
            total[f"{count.stage} {count.branch}"] += count.hits
    return dict(total)
