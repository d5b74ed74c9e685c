"""Entry point: `python -m app.jobs.accept FOLDER --out OUT`, plainly or as the entrypoint of a Ray job.

Qualifies the frozen profile in FOLDER on its acceptance prompts: 36 paired videos, four gates in each topology.  One
shot: the record beside the profile is written once, passed or failed.  Exit status 1 if a gate failed.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from app.jobs.accept.acceptance import Acceptance
from app.jobs.accept.preconditions import require_startable
from app.jobs.calibrate.fits import timestep_changes
from app.jobs.calibrate.settings import CalibrationSettings
from app.jobs.calibrate.studio import StudioSpec
from app.jobs.provenance import provenance
from deployments.stage_cache.evidence import ACCEPTANCE_VIDEOS
from deployments.stage_cache.profile import topology_name
from deployments.wan.checkpoint import open_checkpoint


def main(arguments: list[str] | None = None) -> int:
    """Runs it; returns the exit status."""
    options = _parser().parse_args(arguments)
    kept = CalibrationSettings.model_validate_json((options.folder / "settings.json").read_text())
    source = options.checkpoint or kept.checkpoint
    checkpoint = open_checkpoint(source, kept.revision)
    acceptable = require_startable(options.folder, checkpoint)
    settings = acceptable.settings
    schedule = acceptable.profile.planned(timestep_changes(checkpoint, settings.clip, settings.signal)).schedule
    spec = StudioSpec(source, settings.revision, settings.dtype, settings.on_gpu, settings.clip, options.out)
    run = Acceptance(
        acceptable, schedule, spec, options.folder, options.workers, options.timing_pairs, options.decoder_threads
    )
    if options.stage in ("all", "quality"):
        run.measure_quality()
    if options.stage == "quality":
        return 0
    profile = acceptable.profile
    topologies = [(len(part.stages), cfg) for part in profile.partitions for cfg in profile.cfg]
    timed = run.timing([t for t in topologies if not options.topologies or topology_name(*t) in options.topologies])
    if options.stage == "timing":
        return 0
    missing = sorted(set(profile.topologies) - set(timed))
    if missing:
        print(f"{missing} are not timed; nothing is recorded before all are")
        return 0
    evidence = run.record(run.quality(), timed, provenance(settings.on_gpu, options.source_commit))
    for result in evidence.topologies:
        print(f"{result.topology}: {result.gates.model_dump()} {result.gates.failures() or 'passed'}")
    return 1 if evidence.failures(profile) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m app.jobs.accept", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="a frozen profile")
    parser.add_argument("stage", nargs="?", choices=("all", "quality", "timing"), default="all")
    parser.add_argument("--out", type=Path, required=True, help="folder of JUnit, detail and sheets")
    parser.add_argument("--checkpoint", help="default: where calibration read it")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument(
        "--timing-pairs",
        type=int,
        default=ACCEPTANCE_VIDEOS,
        help="pairs timed in each topology; with fewer than all, quality is that of the same split in one process, "
        "and every timed pair has to be equal to it bit for bit",
    )
    parser.add_argument("--decoder-threads", type=int, default=os.cpu_count() or 1, help="of timed requests on a CPU")
    parser.add_argument("--topologies", nargs="+", help="time only these now, pp1-cfg1 for instance; default: all")
    parser.add_argument("--source-commit", help="default: asked of git")
    return parser


if __name__ == "__main__":
    sys.exit(main())
