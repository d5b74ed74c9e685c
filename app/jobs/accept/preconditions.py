"""What has to hold before an acceptance run may start; it is one shot, so nothing is found out half-way."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from app.jobs.calibrate.settings import CalibrationSettings
from app.jobs.freeze import ACCEPTANCE_PROMPTS, CALIBRATION_PROMPTS
from app.jobs.prompt_set import PromptSet, PromptSetError, require_apart
from deployments.stage_cache.evidence import ACCEPTANCE_VIDEOS, Evidence
from deployments.stage_cache.frozen_profile import ACCEPTANCE, PROFILE, FrozenError, open_profile, require_acceptable
from deployments.stage_cache.profile import Profile, ProfileRefused, ServedModel
from deployments.wan.checkpoint import WanCheckpoint, fingerprint, split_blocks

CALIBRATION_VIDEOS = 48
"""24 prompts with 2 seeds each; fewer prove too little to spend an acceptance set on."""


@dataclass(frozen=True)
class Acceptable:
    """What an acceptance run works with."""

    profile: Profile
    settings: CalibrationSettings
    """Of the calibration; its request and model are accepted."""
    prompts: PromptSet


def require_startable(folder: Path, checkpoint: WanCheckpoint) -> Acceptable:
    """Raise unless the frozen profile in `folder` may be accepted on this checkpoint.

    FrozenError for changed bytes, ProfileRefused for a profile that is not calibrated, was accepted before or is not of
    this model, PromptSetError for prompts that calibration has seen or another acceptance has spent.
    """
    opened = open_profile(folder, allow_unqualified=True)
    require_acceptable(opened)
    profile, calibration, manifest = opened.profile, opened.calibration, opened.manifest
    assert calibration is not None
    assert manifest is not None
    missing = {CALIBRATION_PROMPTS, ACCEPTANCE_PROMPTS, "settings.json"} - {file.name for file in manifest.files}
    if missing:
        raise FrozenError(f"{folder}: {sorted(missing)} not frozen; freeze with `python -m app.jobs.freeze`")
    few = [row.topology for row in calibration.topologies if row.gates.videos < CALIBRATION_VIDEOS]
    if few:
        raise ProfileRefused(
            f"calibration: {few} have fewer than {CALIBRATION_VIDEOS} videos; calibrate on the whole set"
        )
    settings = CalibrationSettings.model_validate_json((folder / "settings.json").read_text())
    for pp in sorted({len(part.stages) for part in profile.partitions}):
        profile.check_served(_served(checkpoint, settings, pp))
    seen, prompts = PromptSet.read(folder / CALIBRATION_PROMPTS), PromptSet.read(folder / ACCEPTANCE_PROMPTS)
    if seen.digest != calibration.prompts_sha256:
        raise PromptSetError(f"{CALIBRATION_PROMPTS}: not the prompts that the calibration record names")
    require_apart(seen, prompts)
    if len(prompts.videos()) != ACCEPTANCE_VIDEOS:
        raise PromptSetError(f"{ACCEPTANCE_PROMPTS}: {len(prompts.videos())} videos, expected {ACCEPTANCE_VIDEOS}")
    spent = [path.parent.name for path in _spent(folder, profile, prompts.digest)]
    if spent:
        raise PromptSetError(f"{ACCEPTANCE_PROMPTS}: already spent on {spent} of the same model; write unseen ones")
    return Acceptable(profile, settings, prompts)


def _served(checkpoint: WanCheckpoint, settings: CalibrationSettings, pp: int) -> ServedModel:
    transformer = checkpoint.transformer_config("transformer")
    return ServedModel(
        repo=settings.checkpoint if settings.revision else None,
        revision=settings.revision,
        fingerprint=fingerprint(checkpoint),
        dtype=settings.dtype,
        layers=checkpoint.num_blocks,
        heads=int(transformer["num_attention_heads"]),
        head_dim=int(transformer["attention_head_dim"]),
        in_channels=int(transformer["in_channels"]),
        split=tuple(map(len, split_blocks(checkpoint.num_blocks, pp, None))),
        cfg=1,
        scheduler=checkpoint.scheduler,
        solver_order=int(checkpoint.scheduler_config.get("solver_order", 1)),
    )


def _spent(folder: Path, profile: Profile, prompts: str) -> Iterator[Path]:
    """Acceptance records of other profiles of the same weights, beside this one, that used the same prompts."""
    for path in sorted(folder.resolve().parent.glob(f"*/{ACCEPTANCE}")):
        if path.parent == folder.resolve():
            continue
        other = Profile.from_yaml((path.parent / PROFILE).read_text())
        if other.model == profile.model and Evidence.model_validate_json(path.read_text()).prompts_sha256 == prompts:
            yield path
