"""What went wrong with a job: whether another worker may do better, and how its owner is told."""

from __future__ import annotations

from ray.exceptions import ObjectLostError, RayActorError, RayTaskError, TaskCancelledError
from ray.serve.exceptions import DeploymentUnavailableError, ReplicaUnavailableError, RequestCancelledError

from app.driver.job_state import JobError, VideoParams
from deployments.gang.gang_lost import GangLost
from deployments.storage import StorageUnavailable

_LOST = (
    RayActorError,
    ObjectLostError,
    GangLost,
    # A replica that shuts down cancels what it has not finished.
    TaskCancelledError,
    RequestCancelledError,
    DeploymentUnavailableError,
    ReplicaUnavailableError,
)


def cause_of(error: BaseException) -> BaseException:
    """What was raised in the worker, out of Ray's wrapping."""
    while isinstance(error, RayTaskError) and isinstance(error.cause, BaseException) and error.cause is not error:
        error = error.cause
    return error


def worker_was_lost(error: BaseException) -> bool:
    """Whether the work may succeed on another worker: its process died or went, or its gang broke under it."""
    return isinstance(cause_of(error), _LOST)


def job_error(error: BaseException, params: VideoParams) -> JobError:
    """For the owner of a job that another attempt would not help."""
    cause = cause_of(error)
    said = " ".join(str(cause).split()) or "no message"
    if isinstance(cause, MemoryError) or type(cause).__name__ == "OutOfMemoryError":  # torch's, without importing it
        size = f"{params.width}x{params.height} with {params.num_frames} frames"
        return JobError(
            code="out_of_memory",
            message=f"{size} did not fit into the memory of a worker; ask for fewer pixels or frames ({said})",
        )
    if isinstance(cause, StorageUnavailable):
        return JobError(code="storage_unavailable", message=f"the result could not be stored: {said}")
    return JobError(code="generation_failed", message=f"a worker failed: {type(cause).__name__}: {said}")


def lost_too_often(error: BaseException, losses: int) -> JobError:
    """For the owner of a job whose workers were lost again and again."""
    cause = cause_of(error)
    said = " ".join(str(cause).split())[:500]
    return JobError(
        code="worker_lost",
        message=f"a worker was lost {losses} times in a row (jobs.max_attempts) without the job getting any further; "
        f"the last time: {type(cause).__name__}: {said}",
    )
