"""A status follows from records; no record can claim one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from deployments.stage_cache.evidence import EvidenceError, Status, status_of

if TYPE_CHECKING:
    from conftest import MakeEvidence, MakeProfile

TOPOLOGIES = ("pp1-cfg1", "pp1-cfg2", "pp2-cfg1", "pp2-cfg2")


def test_statuses_in_order(profile: MakeProfile, evidence: MakeEvidence) -> None:
    p, calibration, acceptance = profile(), evidence("calibration"), evidence("acceptance")
    assert status_of(p, True, None, None) is Status.DRAFT
    assert status_of(p, False, calibration, acceptance) is Status.DRAFT  # not frozen: the bytes may change any time
    assert status_of(p, True, calibration, None) is Status.CALIBRATED
    assert status_of(p, True, calibration, acceptance) is Status.QUALIFIED


@pytest.mark.parametrize("failing", TOPOLOGIES)
def test_any_failed_calibration_of_the_four_is_diagnostic_only(
    profile: MakeProfile, evidence: MakeEvidence, failing: str
) -> None:
    """Check 18."""
    calibration = evidence("calibration", failing)
    assert status_of(profile(), True, calibration, evidence("acceptance")) is Status.DIAGNOSTIC_ONLY
    assert calibration.failures(profile()) == [f"{failing} mean_temporal_error_ratio: 0.2, required <= 0.1"]


@pytest.mark.parametrize("left_out", TOPOLOGIES)
def test_a_topology_that_was_left_out_has_not_passed(
    profile: MakeProfile, evidence: MakeEvidence, left_out: str
) -> None:
    kept = tuple(t for t in evidence("calibration").topologies if t.topology != left_out)
    calibration = evidence("calibration", topologies=kept)
    assert status_of(profile(), True, calibration, None) is Status.DIAGNOSTIC_ONLY
    acceptance = evidence("acceptance", topologies=kept)
    assert status_of(profile(), True, evidence("calibration"), acceptance) is Status.CALIBRATED


def test_a_failed_acceptance_does_not_qualify(profile: MakeProfile, evidence: MakeEvidence) -> None:
    acceptance = evidence("acceptance", "pp2-cfg1")
    assert status_of(profile(), True, evidence("calibration"), acceptance) is Status.CALIBRATED


def test_acceptance_takes_36_videos_a_topology(profile: MakeProfile, evidence: MakeEvidence) -> None:
    """Check 19, the count: 12 prompts x 3 seeds."""
    acceptance = evidence("acceptance", videos=35)
    assert status_of(profile(), True, evidence("calibration"), acceptance) is Status.CALIBRATED
    assert acceptance.failures(profile())[0] == "pp1-cfg1: 35 videos, required 36"


def test_records_of_another_profile_are_errors(profile: MakeProfile, evidence: MakeEvidence) -> None:
    """One changed number in the profile and its evidence is about something else."""
    with pytest.raises(EvidenceError, match="changed afterwards"):
        status_of(profile("small-v2"), True, evidence("calibration"), None)
    with pytest.raises(EvidenceError, match="kind: got acceptance"):
        status_of(profile(), True, evidence("acceptance"), None)


@pytest.mark.parametrize("changes", [{"seeds": (2, 3)}, {"prompts_sha256": "1" * 64}])
def test_acceptance_on_seen_data_is_an_error(
    profile: MakeProfile, evidence: MakeEvidence, changes: dict[str, Any]
) -> None:
    with pytest.raises(EvidenceError, match="must be unseen"):
        status_of(profile(), True, evidence("calibration"), evidence("acceptance", **changes))
    with pytest.raises(EvidenceError, match="what was unseen"):
        status_of(profile(), True, None, evidence("acceptance"))


def test_adding_evidence_changes_no_byte_of_the_profile(profile: MakeProfile, evidence: MakeEvidence) -> None:
    before = profile().to_yaml()
    status_of(profile(), True, evidence("calibration"), evidence("acceptance"))
    assert profile().to_yaml() == before
    assert "status" not in before
