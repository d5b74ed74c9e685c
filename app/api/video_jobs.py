"""What the HTTP surface asks of the driver.  `app.ingress.HandleJobs` gives it over a Serve handle, tests by a fake."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Literal, NamedTuple, Protocol, TypedDict

from app.driver.job_state import JobView, VideoParams

Order = Literal["asc", "desc"]


class JobPage(NamedTuple):
    """A slice of the job table."""

    jobs: list[JobView]
    has_more: bool
    """Whether jobs follow the last one in this order."""


class Readiness(TypedDict):
    """Whether a model can work now."""

    ready: bool
    reason: str
    """Why not; empty when ready."""


class VideoJobs(Protocol):
    """The jobs of all served models.  Every method may raise an `app.api.errors.ApiError`; `NotReady` any of them."""

    async def create(self, params: VideoParams) -> JobView:
        """Accept a job: once this returns it survives every restart.  Raises QueueFull, NotReady."""
        ...

    async def get(self, job_id: str) -> JobView:
        """The job now.  Raises UnknownJob."""
        ...

    async def list(self, limit: int, after: str | None, order: Order) -> JobPage:
        """At most `limit` jobs by creation time, those behind job `after`.  Raises UnknownJob for `after`."""
        ...

    async def cancel(self, job_id: str) -> JobView:
        """Ask for the end of a job; a cancelled one stays as it is.  Raises UnknownJob; WrongState once completed or
        failed."""
        ...

    async def delete(self, job_id: str) -> None:
        """Remove a final job and its files.  Raises UnknownJob; WrongState for a job that is not final."""
        ...

    async def plan(self, job_id: str) -> dict[str, Any]:
        """The job's plan as JSON values.  Raises UnknownJob."""
        ...

    def events(self, job_id: str) -> AsyncIterator[JobView]:
        """The job now, then again on every change; ends after a final state.  The first item raises UnknownJob."""
        ...

    async def wait(self, job_id: str) -> JobView:
        """The job once it is final.  Raises UnknownJob."""
        ...

    async def readiness(self) -> dict[str, Readiness]:
        """Readiness by model name."""
        ...
