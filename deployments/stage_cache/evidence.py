"""What has been shown of a profile, in records of their own that name its digest.

A status is never written down: it follows from the records, so no file can claim one.

    draft            no calibration record, or the folder is not frozen
    diagnostic_only  calibration failed a gate, or left out a topology the profile was made for
    calibrated       calibration passed all gates in every topology
    qualified        and so did acceptance, on unseen prompts and seeds
"""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

from pydantic import Field

from deployments.stage_cache.closed import Closed, Sha256
from deployments.stage_cache.gates import GateValues
from deployments.stage_cache.profile import Profile

ACCEPTANCE_VIDEOS = 36
"""Paired videos a topology: 12 prompts with 3 seeds each."""


class Status(StrEnum):
    """What a profile may be used for; only QUALIFIED is served without an explicit flag."""

    DRAFT = "draft"
    DIAGNOSTIC_ONLY = "diagnostic_only"
    CALIBRATED = "calibrated"
    QUALIFIED = "qualified"


class EvidenceError(ValueError):
    """A record is not about this profile, or proves nothing."""


class TopologyResult(Closed):
    """The gates in one topology."""

    topology: str = Field(pattern=r"^pp[1-9]-cfg[12]$")
    gates: GateValues
    junit_sha256: Sha256 | None = Field(None, description="Of the acceptance run's JUnit file.")


class Evidence(Closed):
    """One calibration or acceptance of one profile."""

    kind: Literal["calibration", "acceptance"]
    profile_sha256: Sha256 = Field(description="`Profile.digest`.")
    prompts_sha256: Sha256
    seeds: tuple[int, ...] = Field(min_length=1)
    topologies: tuple[TopologyResult, ...]
    source_commit: str
    environment_sha256: Sha256 = Field(description="Of the list of installed packages.")
    device: str
    date: str = Field(pattern=r"^\d{4}-\d{2}-\d{2}$")

    def failures(self, profile: Profile) -> list[str]:
        """Why it does not pass in every topology of the profile; empty if it does."""
        results = {result.topology: result.gates for result in self.topologies}
        failed = [f"{name}: not measured" for name in profile.topologies if name not in results]
        for name, gates in results.items():
            failed += [f"{name} {gate}: {text}" for gate, text in gates.failures().items()]
            if self.kind == "acceptance" and gates.videos != ACCEPTANCE_VIDEOS:
                failed.append(f"{name}: {gates.videos} videos, required {ACCEPTANCE_VIDEOS}")
        return failed


def status_of(profile: Profile, frozen: bool, calibration: Evidence | None, acceptance: Evidence | None) -> Status:
    """The status these records give the profile; EvidenceError if they do not belong together."""
    for evidence, kind in ((calibration, "calibration"), (acceptance, "acceptance")):
        if evidence is not None and evidence.kind != kind:
            raise EvidenceError(f"kind: got {evidence.kind} where {kind} is expected")
        if evidence is not None and evidence.profile_sha256 != profile.digest:
            raise EvidenceError(
                f"profile_sha256: the {kind} record is about {evidence.profile_sha256[:12]}, {profile.profile_id} is "
                f"{profile.digest[:12]}; one of the two was changed afterwards"
            )
    if acceptance is not None and calibration is None:
        raise EvidenceError("acceptance: given without a calibration record, so nobody can tell what was unseen")
    if acceptance is not None and calibration is not None:
        shared = sorted(set(acceptance.seeds) & set(calibration.seeds))
        if shared or acceptance.prompts_sha256 == calibration.prompts_sha256:
            raise EvidenceError(
                f"acceptance: shares its prompts or the seeds {shared} with calibration; it must be unseen"
            )
    if calibration is None or not frozen:
        return Status.DRAFT
    if calibration.failures(profile):
        return Status.DIAGNOSTIC_ONLY
    if acceptance is None or acceptance.failures(profile):
        return Status.CALIBRATED
    return Status.QUALIFIED
