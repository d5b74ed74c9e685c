from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from app.api.application import make_app
from app.api.errors import NotReady
from app.config import Http
from app.driver.job_state import JobError, JobState, JobView, VideoParams
from tests.fake_jobs import MP4, FakeJobs, card

pytestmark = pytest.mark.anyio
SCOPE = {
    "type": "http",
    "asgi": {"version": "3.0"},
    "http_version": "1.1",
    "method": "POST",
    "scheme": "http",
    "path": "/v1/videos/sync",
    "raw_path": b"/v1/videos/sync",
    "query_string": b"",
    "root_path": "",
    "headers": [(b"content-type", b"application/json")],
}


class Connection:
    """One raw ASGI request, whose client can hang up."""

    def __init__(self, app: FastAPI) -> None:
        self.sent: list[dict[str, Any]] = []
        self._messages: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._messages.put_nowait({"type": "http.request", "body": json.dumps({"prompt": "a"}).encode()})
        self.task = asyncio.create_task(app(dict(SCOPE), self._messages.get, self._send))

    async def _send(self, message: Any) -> None:
        self.sent.append(message)

    def hang_up(self) -> None:
        self._messages.put_nowait({"type": "http.disconnect"})


async def until(condition: Any) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.002)


async def test_the_answer_is_the_file():
    jobs = FakeJobs(pace_s=0.001)
    app = make_app(jobs, [card()], jobs.files, Http())
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://test") as client:
        for body in ({"json": {"prompt": "a", "seed": 9}}, {"files": {"prompt": (None, "a"), "seed": (None, "9")}}):
            answer = await client.post("/v1/videos/sync", **body)
            assert (answer.status_code, answer.content) == (200, MP4)
            assert answer.headers["content-type"] == "video/mp4"
            assert answer.headers["x-job-id"] == f"video_{jobs.created}"
            assert (answer.headers["x-seed"], answer.headers["x-model"]) == ("9", "wan")
            assert answer.headers["x-fingerprint"] == "f" * 64


async def test_hanging_up_cancels_the_job(app: FastAPI, jobs: FakeJobs):
    connection = Connection(app)
    await until(lambda: jobs.jobs)
    jobs.advance("video_1")
    connection.hang_up()
    await connection.task
    assert jobs.jobs["video_1"].state is JobState.CANCELLED


async def test_a_server_that_cancels_the_request_cancels_the_job(app: FastAPI, jobs: FakeJobs):  # as Ray Serve does
    connection = Connection(app)
    await until(lambda: jobs.jobs)
    connection.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await connection.task
    assert jobs.jobs["video_1"].state is JobState.CANCELLED
    assert not connection.sent


async def test_a_server_that_cancels_the_call_first_cancels_the_job(app: FastAPI, jobs: FakeJobs, monkeypatch: Any):
    """Ray Serve ends the handle calls of a cancelled request, here `wait`, and may do so before it ends the request."""
    waiting: list[asyncio.Task[Any]] = []
    wait = jobs.wait

    async def remember(job_id: str) -> JobView:
        waiting.append(asyncio.current_task())  # type: ignore[arg-type]
        return await wait(job_id)

    monkeypatch.setattr(jobs, "wait", remember)
    connection = Connection(app)
    await until(lambda: waiting)
    waiting[0].cancel()
    await asyncio.wait({connection.task})
    assert jobs.jobs["video_1"].state is JobState.CANCELLED


async def test_a_job_that_was_being_accepted_is_cancelled_too(app: FastAPI, jobs: FakeJobs, monkeypatch: Any):
    accept, creating = asyncio.Event(), asyncio.Event()
    create = jobs.create

    async def slow(params: VideoParams) -> JobView:
        creating.set()
        await accept.wait()
        return await create(params)

    monkeypatch.setattr(jobs, "create", slow)
    connection = Connection(app)
    await creating.wait()
    connection.task.cancel()
    await asyncio.sleep(0.01)
    accept.set()
    with pytest.raises(asyncio.CancelledError):
        await connection.task
    await until(lambda: jobs.jobs and jobs.jobs["video_1"].state is JobState.CANCELLED)


async def test_a_driver_restart_is_waited_through(app: FastAPI, jobs: FakeJobs, monkeypatch: Any):
    wait, calls = jobs.wait, 0

    async def wait_once_in_vain(job_id: str) -> JobView:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise NotReady("the driver restarts", retry_after_s=0.001)
        return await wait(job_id)

    monkeypatch.setattr(jobs, "wait", wait_once_in_vain)
    connection = Connection(app)
    await until(lambda: calls == 2)
    for _ in range(4):
        jobs.advance("video_1")
    await connection.task
    assert connection.sent[0]["status"] == 200


@pytest.mark.parametrize(
    ("state", "status", "code"), [("failed", 500, "job_failed"), ("cancelled", 409, "wrong_state")]
)
async def test_a_job_without_a_file(app: FastAPI, jobs: FakeJobs, state: str, status: int, code: str):
    connection = Connection(app)
    await until(lambda: jobs.jobs)
    jobs.jobs["video_1"].error = JobError(code="worker_lost", message="the gang died")
    jobs._set(jobs.jobs["video_1"], JobState(state))
    await connection.task
    assert connection.sent[0]["status"] == status
    error = json.loads(connection.sent[1]["body"])["error"]
    assert error["code"] == code
    assert ("worker_lost: the gang died" in error["message"]) == (state == "failed")


async def test_a_refused_request_creates_nothing(client: httpx.AsyncClient, jobs: FakeJobs):
    assert (await client.post("/v1/videos/sync", json={"prompt": ""})).status_code == 400
    jobs.max_queued = 0
    assert (await client.post("/v1/videos/sync", json={"prompt": "a"})).status_code == 429
    assert jobs.created == 0
