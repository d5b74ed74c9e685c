"""The stages of a calibration run, each from the files of the one before:

    collect   native videos          rows.jsonl, native/        statistics of every stage of both splits
    sweep     single skips           fits.json, skips.jsonl     error per skipped step
    search    schedules              candidates.jsonl, finals.json, selection.json
    gates     four topologies        timed.jsonl, then the profile's folder, profile/

A stage that was cut off goes on where it stopped; videos, skips and topologies that are there are not measured again.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import TypeVar

from pydantic import TypeAdapter

from app.jobs.calibrate.calibration_gates import topology_results
from app.jobs.calibrate.candidate_run import (
    CachedVideo,
    CandidateRecord,
    CandidateRuns,
    LatencyModel,
    RunCached,
    hit_cost,
)
from app.jobs.calibrate.collect import PIPELINES, CollectVideo, VideoRows
from app.jobs.calibrate.fits import Fits, draft_profile, fit_all, identity_of, read_rows
from app.jobs.calibrate.plots import plot_quality, plot_sensitivity
from app.jobs.calibrate.schedule_search import ScheduleSearch, SearchOutcome, pick, within_margins
from app.jobs.calibrate.served_seconds import OtherSeconds
from app.jobs.calibrate.settings import CalibrationSettings
from app.jobs.calibrate.studio import TEXTS, Studio, write_texts
from app.jobs.calibrate.sweep import FIRST_SWEPT, Skip, SweepVideo, interpolated, sensitivities
from app.jobs.calibrate.workers import Workers
from app.jobs.provenance import Provenance
from app.jobs.timed_topology import TimedTopology, time_topology
from deployments.stage_cache.evidence import Evidence, Status, status_of
from deployments.stage_cache.frozen_profile import CALIBRATION, PROFILE
from deployments.stage_cache.gates import bootstrap_upper
from deployments.stage_cache.predictor import Predictor
from deployments.stage_cache.profile import Profile, topology_name
from deployments.stage_cache.profile_parts import ModelIdentity
from deployments.stage_cache.search import candidates
from deployments.stage_cache.skip_schedule import Schedule
from deployments.stage_cache.step_cache import ErrorLimits
from deployments.wan.checkpoint import fingerprint, open_checkpoint

STAGES = ("collect", "sweep", "search", "gates")
PROFILE_FOLDER = "profile"
Row = TypeVar("Row", VideoRows, Skip, TimedTopology, CandidateRecord)
_FINALS = TypeAdapter(dict[int, CandidateRecord])
"""Records of the chosen schedule on all videos, by number of stages."""


class Calibration:
    """One run in its folder."""

    def __init__(self, run: Path, settings: CalibrationSettings, workers: int, decoder_threads: int) -> None:
        """workers: processes.  decoder_threads: of text encoder and decoder in timed requests on a CPU."""
        self._run, self._settings, self._count = run, settings, workers
        self._decoder_threads = decoder_threads
        self._checkpoint = open_checkpoint(settings.checkpoint, settings.revision)

    def collect(self) -> None:
        """Native runs of all videos."""
        have = self._rows("rows.jsonl", VideoRows)
        done = {(row.prompt, row.seed) for row in have}
        todo = [video for video in self._settings.videos() if tuple(video) not in done]
        if not todo:
            return
        with self._workers() as workers, (self._run / "rows.jsonl").open("a") as file:
            for _, row in workers.map([CollectVideo(video) for video in todo], "collect"):
                file.write(row.model_dump_json() + "\n")
                file.flush()

    def sweep(self) -> None:
        """Fits, then single skips of the first videos."""
        settings = self._settings
        if not (self._run / "fits.json").exists():
            rows = read_rows(self._run / "rows.jsonl")
            fits = fit_all(rows, self._checkpoint, settings.clip, settings.signal)
            (self._run / "fits.json").write_text(fits.model_dump_json())
        fits = self._fits()
        steps = settings.clip.num_inference_steps
        first = max(FIRST_SWEPT, settings.limits.min_anchors)
        predictor = fits.predictor(settings.predictor, 1, 0, Schedule(steps))
        have = {(skip.prompt, skip.seed, skip.step) for skip in self._rows("skips.jsonl", Skip)}
        tasks = []
        for video in settings.videos()[: settings.sweep_videos]:
            todo = [s for s in range(first, steps, settings.sweep_stride) if (*video, s) not in have]
            # A part costs a native run of its own; early steps cost more than late ones, so parts take turns.
            parts = -(-self._count // settings.sweep_videos)
            tasks += [SweepVideo(video, tuple(todo[k::parts]), predictor) for k in range(parts) if todo[k::parts]]
        with self._workers() as workers, (self._run / "skips.jsonl").open("a") as file:
            for _, skips in workers.map(tasks, "sweep"):
                file.write("".join(skip.model_dump_json() + "\n" for skip in skips))
                file.flush()

    def search(self) -> None:
        """Choose a schedule."""
        if (self._run / "selection.json").exists():
            return
        settings, fits = self._settings, self._fits()
        rows = read_rows(self._run / "rows.jsonl")
        allowed = candidates(settings.clip.num_inference_steps, settings.limits)
        swept = interpolated(sensitivities(self._rows("skips.jsonl", Skip)))
        sensitivity = {step: error for step, error in swept.items() if step in allowed}
        with self._workers() as workers:
            latency = self._latency(workers, rows, fits, sensitivity)
            runs = CandidateRuns(workers, latency)
            search = ScheduleSearch(
                runs,
                lambda pp, schedule: self._stages(fits, rows, pp, schedule),
                settings.clip.num_inference_steps,
                settings.limits,
                sensitivity,
                lambda line: print(line, flush=True),
            )
            videos = settings.videos()
            correlation, ratio = search.check_model(videos[: settings.sweep_videos], settings.masks, settings.hits)
            found = [search.best(hits, videos[: settings.swap_videos], settings.swap_trials) for hits in settings.hits]
            schedules = [schedule for schedule in found if schedule is not None]
            finals = search.finals(schedules, videos, PIPELINES)
        chosen, diagnostic = pick(finals)
        records = next(records for schedule, records in finals if schedule == chosen)
        outcome = SearchOutcome(
            reuse=chosen.reuse,
            diagnostic_only=diagnostic,
            within_margins=all(map(within_margins, records.values())),
            temporal_error_upper={
                pp: bootstrap_upper([video.temporal_error for video in record.videos]) for pp, record in records.items()
            },
            rank_correlation=correlation,
            median_ratio=ratio,
            latency_model=latency,
            candidates=len(runs.records),
        )
        (self._run / "candidates.jsonl").write_text("".join(r.model_dump_json() + "\n" for r in runs.records))
        (self._run / "finals.json").write_bytes(_FINALS.dump_json(records))
        (self._run / "selection.json").write_text(outcome.model_dump_json(indent=1) + "\n")

    def gates(self, topologies: Sequence[tuple[int, int]], where: Provenance) -> Status | None:
        """Time the topologies that are not timed yet; once all are, write the profile's folder and say its status.

        A profile is not frozen here, so what passes is a draft until `app.jobs.freeze`.
        """
        profile = self.draft()
        timed = {row.topology: row for row in self._rows("timed.jsonl", TimedTopology)}
        for pp, cfg in topologies:
            if topology_name(pp, cfg) not in timed:
                videos = self._settings.videos()[: self._settings.timing_pairs]
                schedule = profile.planned(self._fits().changes).schedule
                studio = Studio(self._settings.studio(self._run), 0)
                row = time_topology(studio, videos, profile, schedule, (pp, cfg), self._decoder_threads)
                timed[row.topology] = row
                with (self._run / "timed.jsonl").open("a") as file:
                    file.write(row.model_dump_json() + "\n")
                print(f"{row.topology}: ratio {row.latency_ratio:.4f}, 95 % {row.latency_interval}", flush=True)
        if set(timed) < set(profile.topologies):
            return None
        finals = _FINALS.validate_json((self._run / "finals.json").read_text())
        evidence = Evidence(
            kind="calibration",
            profile_sha256=profile.digest,
            prompts_sha256=self._settings.prompts.digest,
            seeds=self._settings.prompts.seeds,
            topologies=topology_results(profile, {pp: r.videos for pp, r in finals.items()}, timed),
            **where.model_dump(),
        )
        self._write_folder(profile, evidence, list(timed.values()))
        return status_of(profile, True, evidence, None)

    def draft(self) -> Profile:
        """The profile of the chosen schedule."""
        outcome = SearchOutcome.model_validate_json((self._run / "selection.json").read_text())
        schedule = Schedule(self._settings.clip.num_inference_steps, outcome.reuse)
        return self._profile(self._fits(), read_rows(self._run / "rows.jsonl"), schedule)

    def _write_folder(self, profile: Profile, evidence: Evidence, timed: Sequence[TimedTopology]) -> None:
        folder = self._run / PROFILE_FOLDER
        folder.mkdir(exist_ok=True)
        (folder / PROFILE).write_text(profile.to_yaml())
        (folder / CALIBRATION).write_text(evidence.model_dump_json(indent=1) + "\n")
        (folder / "gates.json").write_text(json.dumps([row.model_dump(mode="json") for row in timed], indent=1) + "\n")
        (folder / "calibration-prompts.yaml").write_text(self._settings.prompts.to_yaml())
        files = {name: _sha256(self._checkpoint.folder / name) for name in self._checkpoint.files}
        (folder / "model.json").write_text(json.dumps(files, indent=1) + "\n")
        for name in ("fits.json", "skips.jsonl", "candidates.jsonl", "selection.json", "settings.json"):
            shutil.copyfile(self._run / name, folder / name)
        plan = profile.planned(self._fits().changes).schedule.reuse
        plot_sensitivity(folder / "sensitivity.png", self._rows("skips.jsonl", Skip), plan)
        plot_quality(folder / "quality.png", self._rows("candidates.jsonl", CandidateRecord))

    def _latency(
        self, workers: Workers, rows: Sequence[VideoRows], fits: Fits, sensitivity: dict[int, float]
    ) -> LatencyModel:
        """From native steps, one served decoding, and the hits of two runs."""
        settings = self._settings
        quiet = min(sensitivity, key=lambda step: sensitivity[step])
        schedule = Schedule(settings.clip.num_inference_steps, (quiet,))
        predictors = fits.predictors(settings.predictor, 1, schedule)
        cached = [RunCached(video, schedule, predictors, ({},)) for video in settings.videos()[:2]]
        first = settings.videos()[0]
        tasks: list[RunCached | OtherSeconds] = [OtherSeconds(first), *cached]
        answers: list[CachedVideo | float] = workers.all(tasks, "latency model")
        (other,) = (answer for answer in answers if isinstance(answer, float))
        cost = hit_cost([answer for answer in answers if not isinstance(answer, float)])
        return LatencyModel(denoise_s=median(sum(row.step_seconds) for row in rows), other_s=other, hit_cost=cost)

    def _stages(
        self, fits: Fits, rows: Sequence[VideoRows], pp: int, schedule: Schedule
    ) -> tuple[tuple[Predictor, ...], tuple[ErrorLimits, ...]]:
        """As the profile of this schedule has them."""
        profile = self._profile(fits, rows, schedule)
        stages = next(part.stages for part in profile.partitions if len(part.stages) == pp)
        return tuple(s.predictor for s in stages), tuple(profile.error_limits(s) for s in stages)

    def _profile(self, fits: Fits, rows: Sequence[VideoRows], schedule: Schedule) -> Profile:
        settings = self._settings
        return draft_profile(
            settings.profile_id,
            self._identity,
            self._checkpoint,
            settings.clip,
            fits,
            rows,
            schedule,
            settings.predictor,
            settings.limits,
        )

    @cached_property
    def _identity(self) -> ModelIdentity:
        settings, digest = self._settings, fingerprint(self._checkpoint)
        return identity_of(self._checkpoint, digest, settings.dtype, settings.checkpoint, settings.revision)

    def _fits(self) -> Fits:
        return Fits.model_validate_json((self._run / "fits.json").read_text())

    def _rows(self, name: str, kind: type[Row]) -> list[Row]:
        path = self._run / name
        return [kind.model_validate_json(line) for line in path.read_text().splitlines()] if path.exists() else []

    @contextmanager
    def _workers(self) -> Iterator[Workers]:
        spec = self._settings.studio(self._run)
        if not (self._run / TEXTS).exists():
            write_texts(spec, [prompt.text for prompt in self._settings.prompts.prompts])
        with Workers(spec, self._count) as workers:
            yield workers


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
