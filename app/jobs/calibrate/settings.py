"""What one calibration run measures; written into its folder by the first stage, so that all stages agree."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from app.jobs.calibrate.fits import PredictorKind
from app.jobs.calibrate.studio import StudioSpec
from app.jobs.clip_settings import ClipSettings
from app.jobs.prompt_set import PromptSet, Video
from deployments.stage_cache.closed import Closed
from deployments.stage_cache.coefficients import Signal
from deployments.stage_cache.skip_schedule import SkipLimits

SETTINGS = "settings.json"


class SettingsError(ValueError):
    """The folder belongs to another run."""


class CalibrationSettings(Closed):
    """See the module's docstring."""

    profile_id: str
    checkpoint: str
    revision: str | None
    dtype: Literal["float32", "bfloat16"]
    on_gpu: bool
    clip: ClipSettings
    prompts: PromptSet
    signal: Signal = Field(description="Of the polynomial and of the load-time range guard.")
    predictor: PredictorKind
    limits: SkipLimits
    hits: tuple[int, ...] = Field(min_length=1, description="Numbers of reused steps that the search tries.")
    sweep_videos: int = Field(ge=1)
    sweep_stride: int = Field(
        ge=1, description="1 sweeps every step; 2 every other, what lies between is interpolated."
    )
    masks: int = Field(ge=3, description="Random schedules that check the additive model.")
    swap_videos: int = Field(ge=1)
    swap_trials: int = Field(ge=1, description="Schedules judged for each number of hits, the first choice included.")
    timing_pairs: int = Field(ge=1, description="Native and cached requests timed in each topology.")

    def videos(self) -> tuple[Video, ...]:
        """All calibration videos; the first ones are of different prompts."""
        return self.prompts.videos()

    def studio(self, run: Path) -> StudioSpec:
        """What a worker process is made from."""
        return StudioSpec(self.checkpoint, self.revision, self.dtype, self.on_gpu, self.clip, run)


def keep_settings(run: Path, settings: CalibrationSettings) -> None:
    """Write them, or raise SettingsError when the folder has others."""
    path = run / SETTINGS
    if not path.exists():
        run.mkdir(parents=True, exist_ok=True)
        path.write_text(settings.model_dump_json(indent=1))
        return
    kept = CalibrationSettings.model_validate_json(path.read_text())
    if kept != settings:
        fields = CalibrationSettings.model_fields
        wrong = {name: getattr(kept, name) for name in fields if getattr(kept, name) != getattr(settings, name)}
        names = [name for name in wrong if name != "prompts"]
        raise SettingsError(
            f"{path}: this run was begun with { ({name: wrong[name] for name in names}) }"
            f"{' and other prompts' if 'prompts' in wrong else ''}; give the same, or another --out"
        )
