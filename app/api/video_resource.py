"""A job as clients see it: OpenAI's `Video` object, then worldstage's fields.

    state      QUEUED  ENCODING  DENOISING  DECODING  COMPLETED  FAILED  CANCELLED
    status     queued  -------- in_progress --------  completed  failed  cancelled

`cancelled` is ours: OpenAI's API has no cancel.  The openai client hands it through like any final status.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from app.api.video_request import seconds_text
from app.driver.job_state import FINAL, RUNNING, JobError, JobState, JobView, StepCacheReport
from cache_actors.latent_report import CacheReport, Word

Status = Literal["queued", "in_progress", "completed", "failed", "cancelled"]


class Video(BaseModel):
    """One video job.  Times are Unix seconds, durations seconds."""

    model_config = ConfigDict(extra="forbid")

    id: str
    object: Literal["video"]
    created_at: int
    completed_at: int | None = Field(description="When the file was ready; null unless completed.")
    expires_at: int | None = Field(description="Always null: files stay until the job is deleted.")
    status: Status
    progress: int = Field(ge=0, le=100, description="Percent of the expected work; 100 only when completed.")
    error: JobError | None = Field(description="Why the job failed.")

    model: str
    prompt: str
    size: str = Field(description='"WIDTHxHEIGHT" in pixels.')
    seconds: str = Field(description="(num_frames - 1) / fps, to six digits; the exact value is num_frames.")
    num_frames: int
    fps: int
    num_inference_steps: int
    guidance_scale: float
    guidance_scale_2: float | None = Field(description="null on a model with one expert.")
    flow_shift: float
    negative_prompt: str
    seed: int = Field(description="The seed used, drawn once when the request had none.")
    max_sequence_length: int
    step_cache: Literal["auto", "off"]
    outputs: list[Literal["sheet", "frames"]]
    latent_cache: Word
    seed_policy: Literal["own", "donor"]
    seed_given: bool = Field(description="False: the seed was drawn.")
    tenant: str = Field(description="As X-Tenant said; latents are reused within a tenant alone.")

    fingerprint: str = Field(description="SHA-256 of the model's weights.")
    phase: JobState
    step: int = Field(description="Solver steps done in this attempt, those before a resume included.")
    steps: int = Field(description="Solver steps of the whole job.")
    position: int | None = Field(description="Place in the queue, 1 = next; null once it runs.")
    eta_s: float | None = Field(description="Expected seconds to the file; null when unknown or final.")
    attempt: int = Field(description="Runs begun so far; above 1 after a lost worker.")
    started_at: int | None = Field(description="When the first run began.")
    finished_at: int | None = Field(description="When the job became final, whatever the outcome.")
    timings: dict[str, float] = Field(description="Seconds by phase; queued counts all waits.")
    files: dict[str, int] = Field(description="Result files and their bytes.")
    step_cache_report: StepCacheReport | None = Field(description="What was reused; null on a model without a profile.")
    cache: CacheReport | None = Field(description="What the latent cache gave, or why nothing; null until it is asked.")


def video_of(view: JobView) -> Video:
    """The resource of one job."""
    job, params = view.job, view.job.params
    finished = None if job.finished_at is None else int(job.finished_at)
    return Video(
        id=job.id,
        object="video",
        created_at=int(job.created_at),
        completed_at=finished if job.state is JobState.COMPLETED else None,
        expires_at=None,
        status=_status(job.state),
        progress=view.progress,
        error=job.error,
        size=f"{params.width}x{params.height}",
        seconds=seconds_text(params.num_frames, params.fps),
        steps=params.num_inference_steps,
        **params.model_dump(exclude={"width", "height"}),
        fingerprint=job.fingerprint,
        phase=job.state,
        step=job.step,
        position=view.position,
        eta_s=None if job.state in FINAL else view.eta_s,
        attempt=job.attempt,
        started_at=None if job.started_at is None else int(job.started_at),
        finished_at=finished,
        timings=job.timings,
        files=job.files,
        step_cache_report=job.step_cache,
        cache=job.cache,
    )


def _status(state: JobState) -> Status:
    if state in RUNNING:
        return "in_progress"
    match state:
        case JobState.QUEUED:
            return "queued"
        case JobState.COMPLETED:
            return "completed"
        case JobState.FAILED:
            return "failed"
    return "cancelled"
