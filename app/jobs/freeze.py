"""Entry point: `python -m app.jobs.freeze RUN --to FOLDER --acceptance-prompts FILE`: a calibrated profile, for good.

Copies RUN/profile to FOLDER (configs/profiles/ID usually), puts the acceptance prompts beside it, fixed before any
acceptance run, hashes every file into manifest.json and makes all of them read-only.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from app.jobs.prompt_set import PromptSet, PromptSetError, require_apart
from deployments.stage_cache.evidence import Evidence
from deployments.stage_cache.frozen_profile import ACCEPTANCE, CALIBRATION, MANIFEST, FrozenError, freeze, open_profile

CALIBRATION_PROMPTS, ACCEPTANCE_PROMPTS = "calibration-prompts.yaml", "acceptance-prompts.yaml"
CANDIDATES = "candidates.jsonl"


def freeze_run(profile: Path, to: Path, prompts: PromptSet) -> str:
    """Freeze a copy of a calibrated profile's folder and return its status.

    Raises FrozenError if `to` exists, PromptSetError if calibration has seen the prompts.
    """
    if to.exists():
        raise FrozenError(f"{to}: is there already; a frozen profile is never written again, choose another folder")
    if prompts.purpose != "acceptance":
        raise PromptSetError(f"purpose: got {prompts.purpose}, expected acceptance")
    require_apart(PromptSet.read(profile / CALIBRATION_PROMPTS), prompts)
    evidence = Evidence.model_validate_json((profile / CALIBRATION).read_text())
    candidates = len((profile / CANDIDATES).read_text().splitlines())
    shutil.copytree(profile, to, ignore=shutil.ignore_patterns(MANIFEST, ACCEPTANCE))
    (to / ACCEPTANCE_PROMPTS).write_text(prompts.to_yaml())
    names = sorted(path.name for path in to.iterdir())
    freeze(to, names, evidence.source_commit, candidates)
    return open_profile(to, allow_unqualified=True).status.value


def main(arguments: list[str] | None = None) -> None:
    """Freezes and says the status."""
    parser = argparse.ArgumentParser(prog="python -m app.jobs.freeze", description=__doc__)
    parser.add_argument("run", type=Path, help="the --out of `python -m app.jobs.calibrate`")
    parser.add_argument("--to", type=Path, required=True, help="folder of the frozen profile, must not exist")
    parser.add_argument("--acceptance-prompts", type=Path, required=True)
    options = parser.parse_args(arguments)
    status = freeze_run(options.run / "profile", options.to, PromptSet.read(options.acceptance_prompts))
    print(f"{options.to}: frozen, {status}")


if __name__ == "__main__":
    main()
