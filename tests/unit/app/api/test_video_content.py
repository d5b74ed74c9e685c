from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from app.api.application import make_app
from app.config import Http
from deployments.storage import Storage, StorageUnavailable
from tests.fake_jobs import MP4, FakeJobs, card

pytestmark = pytest.mark.anyio


@pytest.fixture
async def done(client: httpx.AsyncClient, jobs: FakeJobs) -> str:
    await client.post("/v1/videos", json={"prompt": "a", "outputs": ["sheet"]})
    for _ in range(4):
        jobs.advance("video_1")
    jobs.files.contents["video_1/sheet.png"] = b"png"
    return "/v1/videos/video_1/content"


async def test_variants(client: httpx.AsyncClient, done: str):
    for query, kind, content in [
        ("", "video/mp4", MP4),
        ("?variant=video", "video/mp4", MP4),
        ("?variant=spritesheet", "image/png", b"png"),
        ("?variant=sheet", "image/png", b"png"),
    ]:
        answer = await client.get(done + query)
        assert (answer.status_code, answer.headers["content-type"], answer.content) == (200, kind, content)
        assert answer.headers["content-length"] == str(len(content))


@pytest.mark.parametrize(
    ("query", "status", "words"),
    [
        ("?variant=frames", 404, "has no frames.npz, it has sheet.png, video.mp4"),
        ("?variant=thumbnail", 400, "expected 'video', 'spritesheet', 'sheet' or 'frames'"),
        ("?variant=../../etc/passwd", 400, "expected 'video'"),
    ],
)
async def test_variants_that_do_not_exist(client: httpx.AsyncClient, done: str, query: str, status: int, words: str):
    answer = await client.get(done + query)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, "variant")
    assert words in answer.json()["error"]["message"]


async def test_a_file_lost_from_the_storage(client: httpx.AsyncClient, jobs: FakeJobs, done: str):
    jobs.files.contents.clear()
    answer = await client.get(done)
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "file_not_found")


async def test_a_storage_that_is_away(client: httpx.AsyncClient, jobs: FakeJobs, done: str, monkeypatch: Any):
    def away(key: str) -> int:
        raise StorageUnavailable(key)

    monkeypatch.setattr(jobs.files, "size", away)
    answer = await client.get(done)
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")


async def test_the_real_storage(tmp_path: Path):
    jobs, storage = FakeJobs(pace_s=0.001), Storage(str(tmp_path))
    storage.put_bytes(MP4, "video_1/video.mp4")
    app = make_app(jobs, [card()], storage, Http())
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://test") as client:
        await client.post("/v1/videos", json={"prompt": "a"})
        await jobs.wait("video_1")
        answer = await client.get("/v1/videos/video_1/content", headers={"Range": "bytes=-10"})
        assert (answer.status_code, answer.content) == (206, MP4[-10:])
        storage.delete("video_1/video.mp4")
        assert (await client.get("/v1/videos/video_1/content")).status_code == 404


async def test_no_file_before_the_end(client: httpx.AsyncClient):
    await client.post("/v1/videos", json={"prompt": "a"})
    answer = await client.get("/v1/videos/video_1/content")
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "wrong_state")


@pytest.mark.parametrize(
    ("asked", "part"),
    [
        ("bytes=0-0", slice(0, 1)),
        ("bytes=10-19", slice(10, 20)),
        ("bytes=1000-", slice(1000, 1024)),
        ("bytes=-24", slice(1000, 1024)),
        ("bytes=1000-9999", slice(1000, 1024)),
    ],
)
async def test_a_range_is_that_part(client: httpx.AsyncClient, done: str, asked: str, part: slice):
    answer = await client.get(done, headers={"Range": asked})
    assert (answer.status_code, answer.content) == (206, MP4[part])
    assert answer.headers["content-range"] == f"bytes {part.start}-{part.stop - 1}/1024"


@pytest.mark.parametrize(
    "asked",
    ["", "bytes=", "bytes=-", "bytes=9-1", "bytes=0-1,4-5", "items=0-1", "bytes=a-b", "bytes=0-", "bytes=-5000"],
)
async def test_a_range_that_means_nothing_or_all_gives_all(client: httpx.AsyncClient, done: str, asked: str):
    answer = await client.get(done, headers={"Range": asked})
    assert (answer.status_code, answer.content) == (200, MP4)


@pytest.mark.parametrize("asked", ["bytes=1024-", "bytes=5000-6000", "bytes=-0"])
async def test_a_range_behind_the_end(client: httpx.AsyncClient, done: str, asked: str):
    answer = await client.get(done, headers={"Range": asked})
    assert (answer.status_code, answer.headers["content-range"]) == (416, "bytes */1024")
    assert answer.json()["error"]["code"] == "range_not_satisfiable"


async def test_etags(client: httpx.AsyncClient, done: str):
    etag = (await client.get(done)).headers["etag"]
    part = {"Range": "bytes=0-9"}
    assert (await client.get(done, headers={**part, "If-Range": etag})).status_code == 206
    assert (await client.get(done, headers={**part, "If-Range": '"other"'})).status_code == 200
    assert (await client.get(done, headers={"If-None-Match": etag})).status_code == 304
    assert (await client.get(f"{done}?variant=sheet")).headers["etag"] != etag
