"""The life of a video job.

QUEUED -> ENCODING -> DENOISING -> DECODING -> COMPLETED
QUEUED -> COMPLETED                              the latent cache had the very result
QUEUED, ENCODING, DENOISING, DECODING -> FAILED | CANCELLED
ENCODING, DENOISING, DECODING -> QUEUED          a lost worker or a restarted driver: the job runs again or resumes
final: COMPLETED, FAILED, CANCELLED
"""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from cache_actors.latent_report import CacheReport, Word


class JobState(StrEnum):
    """States of a job; the values are stored and shown."""

    QUEUED = "queued"
    ENCODING = "encoding"
    DENOISING = "denoising"
    DECODING = "decoding"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"


RUNNING = frozenset({JobState.ENCODING, JobState.DENOISING, JobState.DECODING})
FINAL = frozenset({JobState.COMPLETED, JobState.FAILED, JobState.CANCELLED})
TRANSITIONS: dict[JobState, frozenset[JobState]] = {
    JobState.QUEUED: frozenset({JobState.ENCODING, JobState.COMPLETED, JobState.FAILED, JobState.CANCELLED}),
    JobState.ENCODING: frozenset({JobState.DENOISING, JobState.QUEUED, JobState.FAILED, JobState.CANCELLED}),
    JobState.DENOISING: frozenset({JobState.DECODING, JobState.QUEUED, JobState.FAILED, JobState.CANCELLED}),
    JobState.DECODING: frozenset({JobState.COMPLETED, JobState.QUEUED, JobState.FAILED, JobState.CANCELLED}),
    JobState.COMPLETED: frozenset(),
    JobState.FAILED: frozenset(),
    JobState.CANCELLED: frozenset(),
}


class IllegalTransition(ValueError):
    """A job was asked to take a step its state does not allow."""

    def __init__(self, job_id: str, old: JobState, new: JobState) -> None:
        super().__init__(job_id, old, new)
        self.job_id, self.old, self.new = job_id, old, new

    def __str__(self) -> str:
        allowed = ", ".join(sorted(TRANSITIONS[self.old])) or "nothing: the state is final"
        return f"job {self.job_id}: {self.old} -> {self.new} is not allowed; from {self.old}: {allowed}"


class VideoParams(BaseModel):
    """Every effective value of one request: nothing is filled in later.  Stored with the job and shown in it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str
    prompt: str
    negative_prompt: str
    width: int
    height: int
    num_frames: int
    fps: int
    num_inference_steps: int
    guidance_scale: float
    guidance_scale_2: float | None = Field(description="None on a model with one expert.")
    flow_shift: float
    seed: int = Field(ge=0, lt=2**63)
    max_sequence_length: int
    step_cache: Literal["auto", "off"] = Field("auto", description="off: compute every step, whatever the profile.")
    outputs: tuple[Literal["sheet", "frames"], ...] = Field((), description="Files beside the mp4: PNG sheet, npz.")
    latent_cache: Word = Field("exact", description="What the latent cache may answer with.")
    seed_policy: Literal["own", "donor"] = Field("own", description="donor: a similar prompt's initial noise will do.")
    seed_given: bool = Field(True, description="False: the seed was drawn, the request asks for a new video.")
    tenant: str = Field("default", description="Latents are reused within a tenant alone.")


class JobError(BaseModel):
    """Why a job failed, in words for its owner."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    code: str
    message: str


class BranchSteps(BaseModel):
    """What one rank did for one branch."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    full: int = Field(description="Steps whose blocks ran.")
    reuse: int = Field(description="Steps whose residual was predicted.")


class RankSteps(BaseModel):
    """What one rank did."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    rank: int
    stage: int
    branches: dict[str, BranchSteps]


class Native(BaseModel):
    """Why steps were computed that a profile could have reused."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    code: str = Field(description="A field of the request, off, resumed, memory, error_limit or nonfinite.")
    message: str
    step: int = Field(0, description="From which step on.")


class StepCacheReport(BaseModel):
    """The step cache's part in a job."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    profile: str
    status: str = Field(description="qualified, or less on a server that allows it.")
    reuse: tuple[int, ...] = Field(description="Steps the plan reuses.")
    native: Native | None = Field(description="None: reused as planned.")
    ranks: tuple[RankSteps, ...] = Field((), description="Counted by the ranks; empty until denoising has ended.")


class Job(BaseModel):
    """One row of the job table.  Times are Unix seconds; durations seconds."""

    model_config = ConfigDict(extra="forbid")

    id: str
    params: VideoParams
    state: JobState = JobState.QUEUED
    created_at: float
    started_at: float | None = None
    finished_at: float | None = None
    attempt: int = Field(0, description="Runs begun so far.")
    step: int = Field(0, description="Solver steps done in this attempt, those before a resume included.")
    gang: str | None = Field(None, description="Gang that runs it; a restarted driver asks there first.")
    fingerprint: str = Field(description="SHA-256 of the model's weights.")
    timings: dict[str, float] = Field(default_factory=dict, description="Seconds by phase; queued counts all waits.")
    files: dict[str, int] = Field(default_factory=dict, description="Result files and their bytes.")
    error: JobError | None = None
    step_cache: StepCacheReport | None = Field(None, description="None on a model without a profile.")
    cache: CacheReport | None = Field(None, description="The latent cache's part; None before it was asked.")


class JobView(BaseModel):
    """A job as its owner sees it now: the stored row and what only the running driver knows."""

    model_config = ConfigDict(extra="forbid")

    job: Job
    progress: int = Field(ge=0, le=100, description="Percent of the expected work; 100 only when COMPLETED.")
    position: int | None = Field(None, ge=1, description="Place in the queue, 1 = next; None once it runs.")
    eta_s: float | None = Field(None, ge=0, description="Expected seconds to the file; None when nothing is known yet.")
