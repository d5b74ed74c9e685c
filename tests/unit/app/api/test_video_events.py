from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import httpx
import pytest

from app.api.application import make_app
from app.api.errors import NotReady
from app.api.video_events import event_stream
from app.config import Http
from app.driver.job_state import JobView
from tests.fake_jobs import FakeJobs, card

pytestmark = pytest.mark.anyio


async def test_every_change_until_the_end():
    jobs = FakeJobs(pace_s=0.001)
    app = make_app(jobs, [card()], jobs.files, Http())
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://test") as client:
        await client.post("/v1/videos", json={"prompt": "a"})
        answer = await client.get("/v1/videos/video_1/events")
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = answer.text.split("\n\n")
    assert events.pop() == ""
    assert all(event.startswith("event: video\ndata: {") and event.count("\n") == 1 for event in events)
    phases = [json.loads(event.split("data: ")[1])["phase"] for event in events]
    assert phases == ["queued", "encoding", "denoising", "decoding", "completed"]


async def view() -> JobView:
    jobs = FakeJobs()
    app = make_app(jobs, [card()], jobs.files, Http())
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://test") as client:
        await client.post("/v1/videos", json={"prompt": "a\nb"})
    return await jobs.get("video_1")


class Changes:
    """A driver's stream that blocks, then fails; remembers that it was closed."""

    def __init__(self, quiet_s: float) -> None:
        self.quiet_s, self.closed = quiet_s, False

    async def views(self) -> AsyncIterator[JobView]:
        try:
            await asyncio.sleep(self.quiet_s)
            raise NotReady("the driver restarts")
            yield
        finally:
            self.closed = True


async def test_silence_is_filled_and_a_lost_driver_is_an_event():
    changes = Changes(quiet_s=0.2)
    events = [event async for event in event_stream(await view(), changes.views(), heartbeat_s=0.05)]
    assert events[0].startswith("event: video\n")
    assert events[0].count("\n") == 3  # the prompt's line break did not break the event
    assert set(events[1:-1]) == {": heartbeat\n\n"}  # three or fewer on a busy machine, one at least
    assert '"code": "not_ready"' in events[-1]
    assert events[-1].startswith("event: error\n")
    assert changes.closed


async def test_a_client_that_leaves_closes_the_driver_s_stream():
    changes = Changes(quiet_s=60)
    stream = event_stream(await view(), changes.views(), heartbeat_s=0.01)
    assert (await anext(stream)).startswith("event: video")
    assert await anext(stream) == ": heartbeat\n\n"
    await stream.aclose()
    assert changes.closed
