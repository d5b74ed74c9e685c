"""Check 18: frozen bytes, and who may do what with them."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from pydantic import ValidationError

from deployments.stage_cache.evidence import Evidence, EvidenceError, Status
from deployments.stage_cache.frozen_profile import FrozenError, check_manifest, freeze, open_profile, require_acceptable
from deployments.stage_cache.profile import Profile, ProfileRefused

if TYPE_CHECKING:
    from conftest import MakeEvidence, MakeProfile

NAMES = ("profile.yaml", "calibration.json", "candidates.json")


def write(folder: Path, profile: Profile, calibration: Evidence) -> None:
    """An unfrozen profile folder."""
    (folder / "profile.yaml").write_text(profile.to_yaml())
    (folder / "calibration.json").write_text(calibration.model_dump_json())
    (folder / "candidates.json").write_text("[]")


def overwrite(path: Path, text: str) -> None:
    path.chmod(0o644)
    path.write_text(text)


def test_freeze_makes_read_only_files_with_their_hashes(
    tmp_path: Path, profile: MakeProfile, evidence: MakeEvidence
) -> None:
    write(tmp_path, profile(), evidence("calibration"))
    manifest = freeze(tmp_path, NAMES, "c0ffee", candidates=18)
    assert check_manifest(tmp_path) == manifest
    assert [file.name for file in manifest.files] == sorted(NAMES)
    assert (manifest.source_commit, manifest.candidates) == ("c0ffee", 18)
    for name in (*NAMES, "manifest.json"):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o444
    with pytest.raises(FrozenError, match="already has a manifest"):
        freeze(tmp_path, NAMES, "c0ffee", candidates=18)


@pytest.mark.parametrize("name", NAMES)
def test_any_changed_or_missing_byte_is_refused(
    tmp_path: Path, profile: MakeProfile, evidence: MakeEvidence, name: str
) -> None:
    write(tmp_path, profile(), evidence("calibration"))
    freeze(tmp_path, NAMES, "c0ffee", candidates=18)
    overwrite(tmp_path / name, (tmp_path / name).read_text() + "\n")
    with pytest.raises(FrozenError, match=f"{name} has changed"):
        open_profile(tmp_path, allow_unqualified=True)
    (tmp_path / name).unlink()
    with pytest.raises((FrozenError, ProfileRefused), match=name):
        open_profile(tmp_path, allow_unqualified=True)


def test_names_that_prove_nothing_are_refused(tmp_path: Path, profile: MakeProfile, evidence: MakeEvidence) -> None:
    write(tmp_path, profile(), evidence("calibration"))
    for names in (NAMES[:1], NAMES[1:], (*NAMES, "acceptance.json")):
        with pytest.raises(FrozenError, match="and never acceptance"):
            freeze(tmp_path, names, "c0ffee", candidates=18)


def test_a_draft_needs_the_flag(tmp_path: Path, profile: MakeProfile) -> None:
    """Not qualified means refused at start, unless an explicit flag says otherwise."""
    with pytest.raises(ProfileRefused, match=r"no profile\.yaml"):
        open_profile(tmp_path)
    (tmp_path / "profile.yaml").write_text(profile().to_yaml())
    with pytest.raises(ProfileRefused, match=r"small-v1 is draft, not qualified.*allow_unqualified: true"):
        open_profile(tmp_path)
    opened = open_profile(tmp_path, allow_unqualified=True)
    assert (opened.profile, opened.status) == (profile(), Status.DRAFT)
    with pytest.raises(ProfileRefused, match="not frozen"):
        require_acceptable(opened)


def test_from_calibrated_to_qualified(tmp_path: Path, profile: MakeProfile, evidence: MakeEvidence) -> None:
    write(tmp_path, profile(), evidence("calibration"))
    freeze(tmp_path, NAMES, "c0ffee", candidates=18)
    with pytest.raises(ProfileRefused, match="is calibrated, not qualified"):
        open_profile(tmp_path)
    require_acceptable(open_profile(tmp_path, allow_unqualified=True))
    (tmp_path / "acceptance.json").write_text(evidence("acceptance").model_dump_json())
    opened = open_profile(tmp_path)
    assert opened.status is Status.QUALIFIED
    with pytest.raises(ProfileRefused, match="one shot"):
        require_acceptable(opened)


def test_a_failed_acceptance_is_spent(tmp_path: Path, profile: MakeProfile, evidence: MakeEvidence) -> None:
    write(tmp_path, profile(), evidence("calibration"))
    freeze(tmp_path, NAMES, "c0ffee", candidates=18)
    (tmp_path / "acceptance.json").write_text(evidence("acceptance", "pp1-cfg2").model_dump_json())
    with pytest.raises(ProfileRefused, match="not qualified"):
        open_profile(tmp_path)
    with pytest.raises(ProfileRefused, match="one shot"):
        require_acceptable(open_profile(tmp_path, allow_unqualified=True))


def test_acceptance_refuses_a_diagnostic_profile(tmp_path: Path, profile: MakeProfile, evidence: MakeEvidence) -> None:
    write(tmp_path, profile(), evidence("calibration", "pp2-cfg2"))
    freeze(tmp_path, NAMES, "c0ffee", candidates=18)
    opened = open_profile(tmp_path, allow_unqualified=True)
    assert opened.status is Status.DIAGNOSTIC_ONLY
    with pytest.raises(ProfileRefused, match=r"diagnostic_only: pp2-cfg2 mean_temporal_error_ratio: 0\.2"):
        require_acceptable(opened)


def test_evidence_of_another_profile_is_refused(tmp_path: Path, profile: MakeProfile, evidence: MakeEvidence) -> None:
    """Editing profile.yaml and hashing it again does not help: the calibration names the old digest."""
    write(tmp_path, profile("small-v2"), evidence("calibration"))
    freeze(tmp_path, NAMES, "c0ffee", candidates=18)
    with pytest.raises(EvidenceError, match="changed afterwards"):
        open_profile(tmp_path, allow_unqualified=True)


def test_a_status_cannot_be_claimed(tmp_path: Path, profile: MakeProfile) -> None:
    (tmp_path / "profile.yaml").write_text(profile().to_yaml() + "status: qualified\n")
    with pytest.raises(ValidationError, match="status"):
        open_profile(tmp_path, allow_unqualified=True)
