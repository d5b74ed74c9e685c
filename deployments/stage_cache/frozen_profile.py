"""A profile's folder on disk: frozen files, their manifest, and the acceptance record that comes later.

profile.yaml       the profile                                    frozen
calibration.json   calibration evidence                           frozen
...                fits, candidates, prompt files, model list     frozen
manifest.json      SHA-256 of each of the above                   written by `freeze`
acceptance.json    acceptance evidence, names the profile         added afterwards, changes no frozen byte
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import Field

from deployments.stage_cache.closed import Closed, Sha256
from deployments.stage_cache.evidence import Evidence, Status, status_of
from deployments.stage_cache.profile import Profile, ProfileRefused

PROFILE, CALIBRATION, ACCEPTANCE, MANIFEST = "profile.yaml", "calibration.json", "acceptance.json", "manifest.json"


class FrozenError(ValueError):
    """A frozen folder is not what its manifest says, or cannot be frozen."""


class FileHash(Closed):
    """One frozen file."""

    name: str = Field(description="Within the folder.")
    sha256: Sha256


class Manifest(Closed):
    """What was frozen, and from what."""

    files: tuple[FileHash, ...]
    source_commit: str
    candidates: int = Field(ge=1, description="Candidates the search recorded, pass or fail.")


@dataclass(frozen=True)
class OpenedProfile:
    """A profile with what its folder proves."""

    profile: Profile
    status: Status
    calibration: Evidence | None
    acceptance: Evidence | None
    manifest: Manifest | None
    """None: the folder is not frozen."""


def freeze(folder: Path, names: Sequence[str], source_commit: str, candidates: int) -> Manifest:
    """Hash the named files, write the manifest and make all of them read-only.  A frozen folder is not frozen again."""
    if (folder / MANIFEST).exists():
        raise FrozenError(f"{folder}: already has a {MANIFEST}; freeze a new folder instead")
    needed = [name for name in (PROFILE, CALIBRATION) if name not in names]
    if needed or ACCEPTANCE in names:
        raise FrozenError(f"names: got {list(names)}, expected {PROFILE} and {CALIBRATION}, and never {ACCEPTANCE}")
    files = tuple(FileHash(name=name, sha256=_sha256(folder / name)) for name in sorted(set(names)))
    manifest = Manifest(files=files, source_commit=source_commit, candidates=candidates)
    (folder / MANIFEST).write_text(json.dumps(manifest.model_dump(mode="json"), indent=1) + "\n")
    for name in (*names, MANIFEST):
        (folder / name).chmod(0o444)
    return manifest


def check_manifest(folder: Path) -> Manifest:
    """The manifest, after every file has been hashed again; FrozenError names all that changed or are missing."""
    manifest = Manifest.model_validate_json((folder / MANIFEST).read_text())
    wrong = []
    for file in manifest.files:
        path = folder / file.name
        if not path.is_file():
            wrong.append(f"{file.name} is missing")
        elif _sha256(path) != file.sha256:
            wrong.append(f"{file.name} has changed")
    if PROFILE not in {file.name for file in manifest.files}:
        wrong.append(f"{PROFILE} is not in it")
    if wrong:
        raise FrozenError(f"{folder / MANIFEST}: {'; '.join(wrong)}; restore the frozen bytes or calibrate anew")
    return manifest


def open_profile(folder: Path, allow_unqualified: bool = False) -> OpenedProfile:
    """Read a profile folder and decide its status.

    Raises ProfileRefused for a status below qualified unless ``allow_unqualified``, FrozenError for changed bytes,
    EvidenceError for records of another profile, pydantic's ValidationError for unknown or wrong fields.
    """
    if not (folder / PROFILE).is_file():
        raise ProfileRefused(f"{folder}: no {PROFILE} in it; give the folder of a profile")
    manifest = check_manifest(folder) if (folder / MANIFEST).exists() else None
    profile = Profile.from_yaml((folder / PROFILE).read_text())
    calibration, acceptance = _evidence(folder / CALIBRATION), _evidence(folder / ACCEPTANCE)
    if manifest is not None and CALIBRATION not in {file.name for file in manifest.files}:
        raise FrozenError(f"{folder / MANIFEST}: {CALIBRATION} is not in it; an unfrozen record proves nothing")
    status = status_of(profile, manifest is not None, calibration, acceptance)
    if status is not Status.QUALIFIED and not allow_unqualified:
        raise ProfileRefused(
            f"profile {profile.profile_id} is {status.value}, not qualified; accept it first, or set "
            "allow_unqualified: true and every response will say so"
        )
    return OpenedProfile(profile, status, calibration, acceptance, manifest)


def require_acceptable(opened: OpenedProfile) -> None:
    """Raise ProfileRefused unless an acceptance run may start: frozen, calibrated everywhere, and not accepted yet."""
    name = opened.profile.profile_id
    if opened.manifest is None:
        raise ProfileRefused(f"profile {name} is not frozen; freeze it first")
    if opened.status is Status.DIAGNOSTIC_ONLY and opened.calibration is not None:
        failed = "; ".join(opened.calibration.failures(opened.profile))
        raise ProfileRefused(f"profile {name} is diagnostic_only: {failed}")
    if opened.acceptance is not None:
        raise ProfileRefused(f"profile {name} has been accepted or has failed: its one shot on these prompts is spent")


def _evidence(path: Path) -> Evidence | None:
    return Evidence.model_validate_json(path.read_text()) if path.exists() else None


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
