"""Measuring one schedule: cached videos in one process, compared with their native references."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal, NamedTuple

from pydantic import Field

from app.jobs.calibrate.stage_chain import CachedRunner
from app.jobs.calibrate.studio import Studio
from app.jobs.calibrate.workers import Workers
from app.jobs.prompt_set import Video
from app.jobs.video_pair import PairQuality, compare, gate_values, mean_temporal_error
from deployments.plan import BRANCHES
from deployments.stage_cache.closed import Closed
from deployments.stage_cache.predictor import Predictor
from deployments.stage_cache.selection import Candidate, HitCount
from deployments.stage_cache.skip_schedule import Schedule
from deployments.stage_cache.step_cache import ErrorLimits

Purpose = Literal["additive check", "search", "finalist", "comparison"]


class CachedVideo(Closed):
    """One cached run."""

    quality: PairQuality
    hits: tuple[HitCount, ...]
    trips: int
    hit_seconds: tuple[float, ...]
    full_seconds: tuple[float, ...]


@dataclass(frozen=True)
class RunCached:
    """A `Task`.  predictors, limits: one a stage; the number of stages is theirs."""

    video: Video
    schedule: Schedule
    predictors: tuple[Predictor, ...]
    limits: tuple[ErrorLimits, ...]
    keep: bool = False
    """Keep the latents beside the native ones, for the gangs to be compared with."""

    def __call__(self, studio: Studio) -> CachedVideo:
        """See the class."""
        pp = len(self.predictors)
        chain, prepared = studio.chain(pp), studio.prepared(pp, self.video.prompt)
        cached = CachedRunner(chain, prepared, self.schedule, self.predictors, self.limits, studio.device)
        run = chain.run(prepared, self.video.seed, cached.runner, cached.before_step)
        quality = compare(self.video, studio.native(self.video), (studio.decode(run.latents), run.latents))
        if self.keep:
            studio.save_cached(self.video, pp, self.schedule, run.latents)
        seconds = list(enumerate(run.step_seconds))
        return CachedVideo(
            quality=quality,
            hits=tuple(
                HitCount(stage=stage, branch=branch, hits=cached.hits.get((stage, branch), 0))
                for stage in range(pp)
                for branch in BRANCHES
            ),
            trips=cached.trips,
            hit_seconds=tuple(s for step, s in seconds if self.schedule.reuses(step)),
            full_seconds=tuple(s for step, s in seconds if not self.schedule.reuses(step)),
        )


class LatencyModel(Closed):
    """ratio = 1 - f h (1 - c), for ranking schedules before any of them is timed in a gang."""

    denoise_s: float = Field(gt=0, description="Of a native request.")
    other_s: float = Field(ge=0, description="Text, decoding and file.")
    hit_cost: float = Field(ge=0, description="Of a full step's time.")

    def ratio(self, schedule: Schedule) -> float:
        """Expected cached over native time of a whole request."""
        share = self.denoise_s / (self.denoise_s + self.other_s)
        return 1.0 - share * len(schedule.reuse) / schedule.steps * (1.0 - self.hit_cost)


class CandidateRecord(Closed):
    """One measured schedule, pass or fail: a line of candidates.jsonl."""

    purpose: Purpose
    candidate: Candidate
    latency: Literal["estimated"] = Field("estimated", description="By the latency model; gangs time the winner.")
    failures: dict[str, str] = Field(description="Gates that failed.")
    guard_trips: int
    videos: tuple[PairQuality, ...]

    @property
    def temporal_error(self) -> float:
        """Mean over videos."""
        return mean_temporal_error(self.videos)


class Trial(NamedTuple):
    """A schedule to be measured."""

    name: str
    videos: Sequence[Video]
    schedule: Schedule
    predictors: tuple[Predictor, ...]
    """One a stage."""
    limits: tuple[ErrorLimits, ...] | None = None
    """One a stage; None leaves the guards off."""


class CandidateRuns:
    """Measures schedules on worker processes and keeps every result."""

    def __init__(self, workers: Workers, latency: LatencyModel) -> None:
        self._workers, self._latency = workers, latency
        self.records: list[CandidateRecord] = []

    def measure(self, purpose: Purpose, trials: Sequence[Trial]) -> list[CandidateRecord]:
        """Run the videos of all trials, spread over the workers, and record the outcomes."""
        tasks = [
            RunCached(
                video,
                trial.schedule,
                trial.predictors,
                trial.limits or tuple({} for _ in trial.predictors),
                keep=purpose == "finalist",
            )
            for trial in trials
            for video in trial.videos
        ]
        runs = iter(self._workers.all(tasks, f"{purpose} {trials[0].name}"))
        measured = [self._record(purpose, trial, [next(runs) for _ in trial.videos]) for trial in trials]
        self.records += measured
        return measured

    def _record(self, purpose: Purpose, trial: Trial, runs: Sequence[CachedVideo]) -> CandidateRecord:
        hits = Counter[tuple[int, str]]()
        for run in runs:
            for count in run.hits:
                hits[count.stage, count.branch] += count.hits
        gates = gate_values([run.quality for run in runs], self._latency.ratio(trial.schedule))
        candidate = Candidate(
            name=trial.name,
            split="calibration",
            pp=len(trial.predictors),
            reuse=trial.schedule.reuse,
            predictor=trial.predictors[0].kind,
            gates=gates,
            hits=tuple(
                HitCount(stage=stage, branch=branch, hits=hits[stage, branch])
                for stage in range(len(trial.predictors))
                for branch in BRANCHES
            ),
        )
        return CandidateRecord(
            purpose=purpose,
            candidate=candidate,
            failures=gates.failures(),
            guard_trips=sum(run.trips for run in runs),
            videos=tuple(run.quality for run in runs),
        )


def hit_cost(runs: Sequence[CachedVideo]) -> float:
    """Median time of a hit over that of a full step."""
    hits = [s for run in runs for s in run.hit_seconds]
    full = [s for run in runs for s in run.full_seconds]
    return median(hits) / median(full)
