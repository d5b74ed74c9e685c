"""Check 18: a frozen profile is read-only, hashed, and comes with prompts that calibration has not seen."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from app.jobs import freeze as job
from app.jobs.prompt_set import PromptSet, PromptSetError
from deployments.stage_cache.frozen_profile import FrozenError, check_manifest

if TYPE_CHECKING:
    from conftest import WriteRun

UNSEEN = PromptSet.model_validate(
    {
        "format": "worldstage-prompts/1",
        "purpose": "acceptance",
        "seeds": [11],
        "prompts": [{"kind": "static", "text": "a triangle"}],
    }
)


def test_all_files_are_copied_hashed_and_read_only(write_run: WriteRun, tmp_path: Path) -> None:
    run, to = write_run(), tmp_path / "profiles" / "smallest-v1"
    assert job.freeze_run(run / "profile", to, UNSEEN) == "calibrated"
    manifest = check_manifest(to)
    names = {path.name for path in to.iterdir()}
    assert {file.name for file in manifest.files} == names - {"manifest.json"}
    assert names >= {"profile.yaml", "acceptance-prompts.yaml", "calibration-prompts.yaml", "candidates.jsonl"}
    assert (manifest.source_commit, manifest.candidates) == ("c0ffee", 2)
    assert {stat.S_IMODE(path.stat().st_mode) for path in to.iterdir()} == {0o444}
    assert PromptSet.read(to / "acceptance-prompts.yaml") == UNSEEN


def test_a_failed_calibration_stays_diagnostic(write_run: WriteRun, tmp_path: Path) -> None:
    assert job.freeze_run(write_run(temporal_error=0.2) / "profile", tmp_path / "to", UNSEEN) == "diagnostic_only"


def test_what_is_frozen_is_never_written_again(write_run: WriteRun, tmp_path: Path) -> None:
    run = write_run()
    job.freeze_run(run / "profile", tmp_path / "to", UNSEEN)
    with pytest.raises(FrozenError, match="never written again"):
        job.freeze_run(run / "profile", tmp_path / "to", UNSEEN)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seeds": (2, 11)}, r"seeds \[2\]"),
        ({"prompts": ({"kind": "static", "text": "a red square circle"},)}, "has seen"),
        ({"purpose": "calibration"}, "expected acceptance"),
    ],
)
def test_seen_prompts_are_refused_and_nothing_is_written(
    write_run: WriteRun, tmp_path: Path, change: dict[str, object], message: str
) -> None:
    prompts = PromptSet.model_validate(UNSEEN.model_dump() | change)
    with pytest.raises(PromptSetError, match=message):
        job.freeze_run(write_run() / "profile", tmp_path / "to", prompts)
    assert not (tmp_path / "to").exists()


def test_the_command_says_where_and_what(write_run: WriteRun, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "prompts.yaml").write_text(UNSEEN.to_yaml())
    to = tmp_path / "to"
    job.main([str(write_run()), "--to", str(to), "--acceptance-prompts", str(tmp_path / "prompts.yaml")])
    assert capsys.readouterr().out == f"{to}: frozen, calibrated\n"
