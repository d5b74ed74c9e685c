"""Entry point: `python -m app.jobs.compare_policies RUN`: same model, same number of reused steps, which quality?

Reads a calibration run and measures each policy on its first videos, in one stage:

    teacache    official rule on the timestep signal with the model's own fit, official bounds, last residual held
    magcache    official rule with the model's own magnitude ratios, residual scaled by them
    hold, scaled, linear, ls2      that predictor at the steps which the search would choose

Thresholds are searched for the wanted number of hits.  Prints a table in Markdown; every row goes to comparison.jsonl.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from app.jobs.calibrate.candidate_run import CandidateRecord, CandidateRuns, Trial
from app.jobs.calibrate.fits import Fits, PredictorKind
from app.jobs.calibrate.schedule_search import SearchOutcome
from app.jobs.calibrate.settings import SETTINGS, CalibrationSettings
from app.jobs.calibrate.sweep import Skip, interpolated, sensitivities
from app.jobs.calibrate.workers import Workers
from deployments.stage_cache.search import candidates, choose
from deployments.stage_cache.skip_schedule import (
    Planned,
    Schedule,
    ScheduleError,
    SkipLimits,
    StageRule,
    magcache_schedule,
    teacache_schedule,
)

COMPARISON = "comparison.jsonl"
OFFICIAL_TEACACHE = SkipLimits(warmup_steps=1, cooldown_steps=1, max_consecutive=1000, min_anchors=1)
"""Step 0 and the last step are full; nothing bounds a row of hits."""
MAGCACHE_RETENTION, MAGCACHE_ROW = 0.2, 3
"""diffusers' defaults: share of first steps that are full, and hits in a row."""


def threshold_for(hits: int, plan: Callable[[float], Planned]) -> Schedule:
    """The schedule with exactly so many hits that the smallest threshold gives; ScheduleError if none does."""
    for threshold in np.geomspace(1e-5, 10.0, 4000):
        schedule = plan(float(threshold)).schedule
        if len(schedule.reuse) == hits:
            return schedule
    raise ScheduleError(f"hits: no threshold gives exactly {hits}; compare at another number")


def rule_schedules(fits: Fits, steps: int, hits: int) -> dict[str, Schedule]:
    """What the official rules choose, on one stage."""
    fit = fits.stage(1, 0)
    rule = StageRule(fit.signal.coefficients, fit.signal.input_range)
    ratios = (fit.ratios.positive, fit.ratios.negative)
    magcache = SkipLimits(
        warmup_steps=max(1, round(MAGCACHE_RETENTION * steps)),
        cooldown_steps=0,
        max_consecutive=MAGCACHE_ROW,
        min_anchors=1,
    )
    return {
        "teacache": threshold_for(hits, lambda t: teacache_schedule(fits.changes, [rule], t, OFFICIAL_TEACACHE)),
        "magcache": threshold_for(hits, lambda t: magcache_schedule(ratios, t, magcache)),
    }


def _policies(
    fits: Fits, steps: int, hits: int, sensitivity: Mapping[int, float], limits: SkipLimits
) -> list[tuple[str, PredictorKind, Schedule]]:
    """Name, predictor and steps of each row."""
    rules, ours = rule_schedules(fits, steps, hits), choose(steps, hits, sensitivity, limits)
    kinds: tuple[PredictorKind, ...] = ("hold", "scaled", "linear", "ls2")
    official: list[tuple[str, PredictorKind, Schedule]] = [
        ("teacache", "hold", rules["teacache"]),
        ("magcache", "scaled", rules["magcache"]),
    ]
    return official + [(kind, kind, ours) for kind in kinds]


def table(rows: Sequence[tuple[str, CandidateRecord]]) -> str:
    """Markdown."""
    lines = [
        "| reused | policy | steps | mean TE | worst TE | mean SSIM | worst SSIM |",
        "|---|---|---|---|---|---|---|",
    ]
    for policy, record in rows:
        gates, errors = record.candidate.gates, [video.temporal_error for video in record.videos]
        lines.append(
            f"| {len(record.candidate.reuse)} | {policy} | {_ranges(record.candidate.reuse)} | "
            f"{gates.mean_temporal_error_ratio:.4f} | {max(errors):.4f} | {gates.mean_ssim:.4f} | "
            f"{gates.min_video_ssim:.4f} |"
        )
    return "\n".join(lines)


def _ranges(steps: Sequence[int]) -> str:
    """1-3 5 8-9 for 1, 2, 3, 5, 8, 9."""
    parts: list[list[int]] = []
    for step in steps:
        if parts and step == parts[-1][-1] + 1:
            parts[-1].append(step)
        else:
            parts.append([step])
    return " ".join(f"{part[0]}-{part[-1]}" if len(part) > 1 else str(part[0]) for part in parts)


def main(arguments: list[str] | None = None) -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(
        prog="python -m app.jobs.compare_policies",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", type=Path, help="the --out of `python -m app.jobs.calibrate`, searched")
    parser.add_argument("--hits", type=int, nargs="+", default=[6, 10, 15])
    parser.add_argument("--videos", type=int, default=8)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args(arguments)
    settings = CalibrationSettings.model_validate_json((options.run / SETTINGS).read_text())
    fits = Fits.model_validate_json((options.run / "fits.json").read_text())
    outcome = SearchOutcome.model_validate_json((options.run / "selection.json").read_text())
    skips = [Skip.model_validate_json(line) for line in (options.run / "skips.jsonl").read_text().splitlines()]
    steps = settings.clip.num_inference_steps
    allowed = candidates(steps, settings.limits)
    sensitivity = {s: e for s, e in interpolated(sensitivities(skips)).items() if s in allowed}
    videos = settings.videos()[: options.videos]
    with Workers(settings.studio(options.run), options.workers) as workers:
        trials = [
            Trial(policy, videos, schedule, fits.predictors(kind, 1, schedule))
            for hits in options.hits
            for policy, kind, schedule in _policies(fits, steps, hits, sensitivity, settings.limits)
        ]
        records = CandidateRuns(workers, outcome.latency_model).measure("comparison", trials)
        rows = [(trial.name, record) for trial, record in zip(trials, records, strict=True)]
    (options.run / COMPARISON).write_text("".join(record.model_dump_json() + "\n" for _, record in rows))
    print(table(rows), flush=True)


if __name__ == "__main__":
    main()
