from __future__ import annotations

import pytest

from app.api.video_request import parse_request, resolve
from app.api.video_resource import video_of
from app.driver.job_state import Job, JobError, JobState, JobView, VideoParams
from tests.fake_jobs import card


def job(state: JobState) -> Job:
    params = resolve(parse_request({"prompt": "a", "seed": 7, "outputs": ["sheet"]}), [card()])
    return Job(
        id="video_1", params=params, state=state, created_at=100.9, started_at=101.2, finished_at=109.9, fingerprint="f"
    )


@pytest.mark.parametrize(
    ("state", "status"),
    [
        ("queued", "queued"),
        ("encoding", "in_progress"),
        ("denoising", "in_progress"),
        ("decoding", "in_progress"),
        ("completed", "completed"),
        ("failed", "failed"),
        ("cancelled", "cancelled"),
    ],
)
def test_status_follows_the_state(state: str, status: str):
    video = video_of(JobView(job=job(JobState(state)), progress=0))
    assert (video.status, video.phase) == (status, state)
    assert video.completed_at == (109 if state == "completed" else None)


def test_every_parameter_is_shown():
    view = JobView(job=job(JobState.QUEUED), progress=0, position=3, eta_s=8.5)
    shown = video_of(view).model_dump()
    sizes = {"width", "height"}  # shown as size
    assert set(VideoParams.model_fields) - sizes <= set(shown)
    assert (shown["size"], shown["seconds"], shown["seed"], shown["steps"]) == ("64x48", "1", 7, 4)
    assert (shown["position"], shown["eta_s"], shown["created_at"]) == (3, 8.5, 100)


def test_a_failure_says_why():
    failed = job(JobState.FAILED)
    failed.error = JobError(code="worker_lost", message="gang 1 died three times")
    video = video_of(JobView(job=failed, progress=40, eta_s=3))
    assert video.error == failed.error
    assert (video.eta_s, video.finished_at) == (None, 109)
