"""What an acceptance run refuses: changed bytes, failed or small calibrations, other weights, seen or spent prompts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from app.jobs.accept.preconditions import require_startable
from app.jobs.freeze import freeze_run
from app.jobs.prompt_set import PromptSet, PromptSetError
from deployments.stage_cache.evidence import Evidence
from deployments.stage_cache.frozen_profile import FrozenError
from deployments.stage_cache.profile import ProfileRefused
from deployments.wan.checkpoint import open_checkpoint
from tests.checkpoints import write_wan_checkpoint

if TYPE_CHECKING:
    from conftest import WriteRun

COLOURS = ("red", "green", "blue", "yellow", "black", "gray", "small", "large", "still", "up", "down", "left")
UNSEEN = PromptSet.model_validate(
    {
        "format": "worldstage-prompts/1",
        "purpose": "acceptance",
        "seeds": [11, 12, 13],
        "prompts": [{"kind": "static", "text": f"a {colour} triangle"} for colour in COLOURS],
    }
)


def frozen(write_run: WriteRun, to: Path, **changes: float) -> Path:
    freeze_run(write_run(to.name, **changes) / "profile", to, UNSEEN)
    return to


def test_a_calibrated_profile_may_start(write_run: WriteRun, tmp_path: Path, checkpoint_folder: Path) -> None:
    acceptable = require_startable(frozen(write_run, tmp_path / "p" / "a"), open_checkpoint(str(checkpoint_folder)))
    assert acceptable.profile.profile_id == "smallest-v1"
    assert len(acceptable.prompts.videos()) == 36


def test_a_changed_byte_is_refused(write_run: WriteRun, tmp_path: Path, checkpoint_folder: Path) -> None:
    folder = frozen(write_run, tmp_path / "p" / "a")
    path = folder / "acceptance-prompts.yaml"
    path.chmod(0o644)
    path.write_text(path.read_text().replace("red", "teal"))
    with pytest.raises(FrozenError, match=r"acceptance-prompts\.yaml has changed"):
        require_startable(folder, open_checkpoint(str(checkpoint_folder)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"temporal_error": 0.2}, "diagnostic_only"), ({"videos": 47}, "fewer than 48")],
)
def test_a_failed_or_small_calibration_is_refused(
    write_run: WriteRun, tmp_path: Path, checkpoint_folder: Path, changes: dict[str, float], message: str
) -> None:
    folder = frozen(write_run, tmp_path / "p" / "a", **changes)
    with pytest.raises(ProfileRefused, match=message):
        require_startable(folder, open_checkpoint(str(checkpoint_folder)))


def test_other_weights_are_refused(write_run: WriteRun, tmp_path: Path) -> None:
    folder = frozen(write_run, tmp_path / "p" / "a")
    other = write_wan_checkpoint(tmp_path / "other", num_blocks=2, seed=1)
    with pytest.raises(ProfileRefused, match="fingerprint"):
        require_startable(folder, open_checkpoint(str(other)))


def test_an_unfrozen_profile_is_refused(write_run: WriteRun, checkpoint_folder: Path) -> None:
    with pytest.raises(ProfileRefused, match="not frozen"):
        require_startable(write_run() / "profile", open_checkpoint(str(checkpoint_folder)))


def test_a_spent_prompt_set_is_refused(write_run: WriteRun, tmp_path: Path, checkpoint_folder: Path) -> None:
    """The record of an earlier profile of the same weights names these prompts: their results have been seen."""
    first, second = frozen(write_run, tmp_path / "p" / "a"), frozen(write_run, tmp_path / "p" / "b")
    spent = json.loads((first / "calibration.json").read_text()) | {
        "kind": "acceptance",
        "prompts_sha256": UNSEEN.digest,
        "seeds": list(UNSEEN.seeds),
    }
    (first / "acceptance.json").write_text(Evidence.model_validate(spent).model_dump_json())
    checkpoint = open_checkpoint(str(checkpoint_folder))
    with pytest.raises(PromptSetError, match=r"already spent on \['a'\]"):
        require_startable(second, checkpoint)
    with pytest.raises(ProfileRefused, match="one shot"):
        require_startable(first, checkpoint)
    shutil.rmtree(first)
    require_startable(second, checkpoint)
