"""From sensitivities to a schedule: additive model checked, choice under a budget, swaps by true error, all videos."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Protocol

from pydantic import Field

from app.jobs.calibrate.candidate_run import CandidateRecord, CandidateRuns, LatencyModel, Trial
from app.jobs.prompt_set import Video
from deployments.stage_cache.closed import Closed
from deployments.stage_cache.gates import FREEZE_MARGINS, bootstrap_upper
from deployments.stage_cache.predictor import Predictor
from deployments.stage_cache.search import check_additive, choose, improve, predicted_error, random_schedule
from deployments.stage_cache.selection import select
from deployments.stage_cache.skip_schedule import Schedule, ScheduleError, SkipLimits
from deployments.stage_cache.step_cache import ErrorLimits

MASK_SEED = 20_26
"""Of the random schedules."""


class MakeStages(Protocol):
    """What every stage of a split uses for a schedule."""

    def __call__(self, pp: int, schedule: Schedule) -> tuple[tuple[Predictor, ...], tuple[ErrorLimits, ...]]:
        """Predictors and error limits, one a stage."""


class SearchOutcome(Closed):
    """What the search decided, and on what grounds: selection.json."""

    reuse: tuple[int, ...]
    diagnostic_only: bool = Field(description="No finalist passed all four gates in both splits.")
    within_margins: bool = Field(description="Whether it also keeps the margins wanted before freezing.")
    temporal_error_upper: dict[int, float] = Field(description="Bootstrap 97.5 % bound of the mean, by stages.")
    rank_correlation: float = Field(description="Additive model against measured random schedules; 1 is perfect.")
    median_ratio: float = Field(description="Measured over predicted error.")
    latency_model: LatencyModel
    candidates: int


class ScheduleSearch:
    """One search on calibration videos."""

    def __init__(
        self,
        runs: CandidateRuns,
        make: MakeStages,
        steps: int,
        limits: SkipLimits,
        sensitivity: dict[int, float],
        tell: Callable[[str], None],
    ) -> None:
        self._runs, self._make, self._steps, self._limits = runs, make, steps, limits
        self._sensitivity, self._tell = sensitivity, tell

    def check_model(self, videos: Sequence[Video], masks: int, hits: Sequence[int]) -> tuple[float, float]:
        """Rank correlation and median ratio of the additive model over random schedules."""
        rng = random.Random(MASK_SEED)
        drawn: dict[Schedule, None] = {}
        while len(drawn) < masks:
            drawn[random_schedule(self._steps, hits[len(drawn) % len(hits)], self._limits, rng)] = None
        trials = [self._trial(f"mask-{number}", videos, schedule, 1) for number, schedule in enumerate(drawn)]
        records = self._runs.measure("additive check", trials)
        measured = {schedule: record.temporal_error for schedule, record in zip(drawn, records, strict=True)}
        check = check_additive(self._sensitivity, measured)
        self._tell(f"additive model: rank correlation {check.rank_correlation:.2f}, ratio {check.median_ratio:.2f}")
        return check.rank_correlation, check.median_ratio

    def best(self, hits: int, videos: Sequence[Video], trials: int) -> Schedule | None:
        """The best schedule found with so many hits; None if the limits leave none."""
        try:
            first = choose(self._steps, hits, self._sensitivity, self._limits)
        except ScheduleError as error:
            self._tell(f"{hits} hits: {error}")
            return None
        judged = 0

        def judge(schedule: Schedule) -> float:
            nonlocal judged
            judged += 1
            (record,) = self._runs.measure("search", [self._trial(f"hits{hits}-{judged}", videos, schedule, 1)])
            return record.temporal_error

        best, measured = improve(first, judge, self._sensitivity, self._limits, trials)
        self._tell(
            f"{hits} hits: {list(best.reuse)}, temporal error {measured:.4f} on {len(videos)} videos, "
            f"predicted {predicted_error(best, self._sensitivity):.4f}"
        )
        return best

    def finals(
        self, schedules: Sequence[Schedule], videos: Sequence[Video], pipelines: Sequence[int]
    ) -> list[tuple[Schedule, dict[int, CandidateRecord]]]:
        """Measure on all videos, most hits first, until one keeps the margins in every split: fewer hits are slower."""
        found = []
        for schedule in sorted(schedules, key=lambda s: -len(s.reuse)):
            name = f"hits{len(schedule.reuse)}"
            trials = [self._trial(f"final-pp{pp}-{name}", videos, schedule, pp, guarded=True) for pp in pipelines]
            records = dict(zip(pipelines, self._runs.measure("finalist", trials), strict=True))
            found.append((schedule, records))
            for pp, record in records.items():
                gates = record.candidate.gates
                self._tell(
                    f"{len(schedule.reuse)} hits, {pp} stages: SSIM {gates.mean_ssim:.4f} (least "
                    f"{gates.min_video_ssim:.4f}), TE {gates.mean_temporal_error_ratio:.4f}, ratio about "
                    f"{gates.latency_ratio:.3f}, trips {record.guard_trips}"
                )
            if all(within_margins(record) for record in records.values()):
                break
        return found

    def _trial(self, name: str, videos: Sequence[Video], schedule: Schedule, pp: int, guarded: bool = False) -> Trial:
        predictors, limits = self._make(pp, schedule)
        return Trial(name, videos, schedule, predictors, limits if guarded else None)


def within_margins(record: CandidateRecord) -> bool:
    """Whether a finalist is good enough to be frozen: unseen prompts shall not decide by luck."""
    errors = [video.temporal_error for video in record.videos]
    return not record.candidate.gates.failures(FREEZE_MARGINS) and bootstrap_upper(errors) <= 0.10


def pick(finals: Sequence[tuple[Schedule, dict[int, CandidateRecord]]]) -> tuple[Schedule, bool]:
    """The fastest schedule that passes in every split, one that keeps the margins first; and whether it is
    diagnostic only, because none passes."""
    passing = [(s, records) for s, records in finals if not any(record.failures for record in records.values())]
    inside = [(s, records) for s, records in finals if all(map(within_margins, records.values()))]
    pool = inside or passing or finals
    deepest = max(pool[0][1])
    selection = select([records[deepest].candidate for _, records in pool], deepest)
    chosen = next(s for s, records in pool if records[deepest].candidate == selection.winner)
    return chosen, not passing
