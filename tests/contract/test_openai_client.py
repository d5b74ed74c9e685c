"""The official openai client, unchanged, against the app: what it parses is what its own types say."""

from __future__ import annotations

import warnings
from collections.abc import AsyncIterator

import httpx2
import openai
import pytest

from app.api.application import make_app
from app.config import Http
from tests.fake_jobs import MP4, FakeJobs, card

pytestmark = [pytest.mark.anyio, pytest.mark.filterwarnings("ignore:The Sora API:DeprecationWarning")]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def jobs() -> FakeJobs:
    return FakeJobs(pace_s=0.001)


@pytest.fixture
async def client(jobs: FakeJobs) -> AsyncIterator[openai.AsyncOpenAI]:
    app = make_app(jobs, [card()], jobs.files, Http())
    transport = httpx2.ASGITransport(app=app)
    async with openai.AsyncOpenAI(
        api_key="unused", base_url="http://test/v1", http_client=httpx2.AsyncClient(transport=transport)
    ) as client:
        yield client


async def test_create_and_poll_then_download(client: openai.AsyncOpenAI):
    video = await client.videos.create_and_poll(prompt="a red disc", seconds="1", size="64x48", poll_interval_ms=1)  # type: ignore[arg-type]
    assert (video.status, video.progress, video.seconds, video.size) == ("completed", 100, "1", "64x48")
    assert (video.object, video.model, video.prompt, video.error) == ("video", "wan", "a red disc", None)
    assert video.completed_at is not None
    assert video.completed_at > video.created_at
    assert (await client.videos.download_content(video.id)).content == MP4


async def test_our_fields_travel_in_extra_body(client: openai.AsyncOpenAI, jobs: FakeJobs):
    extra = {"num_frames": 9, "seed": 2**60, "guidance_scale": 1.5, "outputs": ["sheet", "frames"]}
    video = await client.videos.create(prompt="a", extra_body=extra)
    params = jobs.jobs[video.id].params
    assert {name: getattr(params, name) for name in extra} == {**extra, "outputs": ("sheet", "frames")}
    assert video.model_extra is not None
    assert video.model_extra["seed"] == 2**60


async def test_spritesheet(client: openai.AsyncOpenAI):
    video = await client.videos.create(prompt="a", extra_body={"outputs": ["sheet"]})
    await client.videos.poll(video.id, poll_interval_ms=1)
    assert (await client.videos.download_content(video.id, variant="spritesheet")).content == MP4
    with pytest.raises(openai.BadRequestError, match="expected 'video'"):
        await client.videos.download_content(video.id, variant="thumbnail")


async def test_retrieve_list_and_delete(client: openai.AsyncOpenAI):
    made = [(await client.videos.create(prompt=f"video {number}")).id for number in range(5)]
    assert (await client.videos.retrieve(made[0])).prompt == "video 0"
    assert [video.id async for video in client.videos.list(limit=2, order="asc")] == made  # three pages
    await client.videos.poll(made[0], poll_interval_ms=1)
    gone = await client.videos.delete(made[0])
    assert (gone.id, gone.deleted, gone.object) == (made[0], True, "video.deleted")
    with pytest.raises(openai.NotFoundError) as caught:
        await client.videos.retrieve(made[0])
    assert (caught.value.code, caught.value.type) == ("video_not_found", "invalid_request_error")


async def test_polling_ends_with_a_cancelled_job(client: openai.AsyncOpenAI, jobs: FakeJobs):
    video = await client.videos.create(prompt="a")
    await client.post(f"/videos/{video.id}/cancel", cast_to=object)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert (await client.videos.poll(video.id, poll_interval_ms=1)).status == "cancelled"


async def test_errors_name_the_field(client: openai.AsyncOpenAI, jobs: FakeJobs):
    with pytest.raises(openai.BadRequestError) as caught:
        await client.videos.create(prompt="a", size="100x64")  # type: ignore[arg-type]
    assert (caught.value.param, caught.value.code) == ("size", "invalid_value")
    with pytest.raises(openai.BadRequestError, match="text alone"):
        await client.videos.create(prompt="a", input_reference=b"\x89PNG\xff")
    with pytest.raises(openai.NotFoundError, match="wan"):
        await client.videos.create(prompt="a", model="sora-2")
    assert jobs.created == 0


async def test_a_conflict_is_not_repeated(client: openai.AsyncOpenAI):  # by itself the client sends a 409 three times
    video = await client.videos.create(prompt="a")
    with pytest.raises(openai.ConflictError) as caught:
        await client.videos.delete(video.id)
    assert caught.value.response.request.headers["x-stainless-retry-count"] == "0"


async def test_models(client: openai.AsyncOpenAI):
    assert [model.id async for model in client.models.list()] == ["wan"]
    assert (await client.models.retrieve("wan")).owned_by == "worldstage"
