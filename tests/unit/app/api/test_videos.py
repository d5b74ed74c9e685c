from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from app.api.errors import NotReady
from tests.fake_jobs import FakeJobs

pytestmark = pytest.mark.anyio


async def test_a_job_from_creation_to_deletion(client: httpx.AsyncClient, jobs: FakeJobs):
    made = (await client.post("/v1/videos", json={"prompt": "a red disc", "seed": 5})).json()
    assert (made["id"], made["object"], made["status"], made["seed"]) == ("video_1", "video", "queued", 5)
    assert (made["position"], made["eta_s"], made["progress"]) == (1, 4.0, 0)
    jobs.advance("video_1")
    running = (await client.get("/v1/videos/video_1")).json()
    assert (running["status"], running["phase"], running["position"]) == ("in_progress", "encoding", None)
    assert (await client.delete("/v1/videos/video_1")).json()["error"]["code"] == "wrong_state"
    for _ in range(3):
        jobs.advance("video_1")
    done = (await client.get("/v1/videos/video_1")).json()
    assert (done["status"], done["progress"], done["files"]) == ("completed", 100, {"video.mp4": 1024})
    gone = await client.delete("/v1/videos/video_1")
    assert gone.json() == {"id": "video_1", "object": "video.deleted", "deleted": True}
    assert (await client.get("/v1/videos/video_1")).status_code == 404


async def test_cancel(client: httpx.AsyncClient, jobs: FakeJobs):
    await client.post("/v1/videos", json={"prompt": "a"})
    assert (await client.post("/v1/videos/video_1/cancel", json={"reason": "x"})).json()["error"][
        "code"
    ] == "invalid_body"
    assert (await client.post("/v1/videos/video_1/cancel", json={})).json()["status"] == "cancelled"
    assert (await client.post("/v1/videos/video_1/cancel")).status_code == 200
    await client.post("/v1/videos", json={"prompt": "a"})
    for _ in range(4):
        jobs.advance("video_2")
    assert (await client.post("/v1/videos/video_2/cancel")).status_code == 409


async def test_the_tenant_is_a_header(client: httpx.AsyncClient):
    async def made(**headers: str) -> httpx.Response:
        return await client.post("/v1/videos", json={"prompt": "a"}, headers=headers)

    assert (await made()).json()["tenant"] == "default"
    assert (await made(**{"X-Tenant": "team-1"})).json()["tenant"] == "team-1"
    for wrong in ("", "a b", "x" * 65, "a/b"):
        error = (await made(**{"X-Tenant": wrong})).json()["error"]
        assert (error["code"], error["param"]) == ("invalid_value", "X-Tenant")


async def test_pages(client: httpx.AsyncClient):
    for _ in range(5):
        await client.post("/v1/videos", json={"prompt": "a"})
    pages: dict[str, Any] = {
        "": (["5", "4", "3", "2", "1"], False),
        "?limit=2": (["5", "4"], True),
        "?limit=2&after=video_4": (["3", "2"], True),
        "?limit=2&after=video_3": (["2", "1"], False),
        "?order=asc&after=video_4": (["5"], False),
        "?after=video_1": ([], False),
    }
    for query, (ids, more) in pages.items():
        page = (await client.get(f"/v1/videos{query}")).json()
        names = [f"video_{number}" for number in ids]
        assert [video["id"] for video in page["data"]] == names
        assert page["has_more"] is more
        assert (page["first_id"], page["last_id"]) == ((names[0], names[-1]) if names else (None, None))


@pytest.mark.parametrize(
    ("query", "status", "param"),
    [
        ("limit=0", 400, "limit"),
        ("limit=101", 400, "limit"),
        ("limit=5.0", 400, "limit"),
        ("limit=%205", 400, "limit"),
        ("limit=", 400, "limit"),
        ("limit=1&limit=2", 400, "limit"),
        ("order=up", 400, "order"),
        ("page=2", 400, "page"),
        ("after=video_9", 404, "video_id"),
        ("after=a%00b", 404, "after"),
    ],
)
async def test_wrong_pages(client: httpx.AsyncClient, query: str, status: int, param: str):
    answer = await client.get(f"/v1/videos?{query}")
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", ""),
        ("DELETE", ""),
        ("POST", "/cancel"),
        ("GET", "/plan"),
        ("GET", "/events"),
        ("GET", "/content"),
    ],
)
@pytest.mark.parametrize("video_id", ["video_9", "a%00b", "%F0%9F%98%80", "x" * 5000, "'; drop table jobs"])
async def test_unknown_jobs(client: httpx.AsyncClient, method: str, path: str, video_id: str):
    answer = await client.request(method, f"/v1/videos/{video_id}{path}")
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "video_not_found"


async def test_no_endpoint_takes_unknown_query_parameters(client: httpx.AsyncClient):
    for method, path in [("GET", "/health"), ("POST", "/v1/videos"), ("GET", "/v1/videos/video_1")]:
        answer = await client.request(method, f"{path}?verbose=1")
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "unknown_field")


async def test_plan(client: httpx.AsyncClient):
    await client.post("/v1/videos", json={"prompt": "a"})
    assert (await client.get("/v1/videos/video_1/plan")).json()["digest"] == "d" * 64


async def test_a_full_queue_says_when_to_come_back(client: httpx.AsyncClient, jobs: FakeJobs):
    jobs.max_queued = 0
    answer = await client.post("/v1/videos", json={"prompt": "a"})
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "3")
    assert answer.json()["error"]["type"] == "rate_limit_error"


async def test_a_driver_that_is_away_says_when_to_come_back(
    client: httpx.AsyncClient, jobs: FakeJobs, monkeypatch: pytest.MonkeyPatch
):
    async def away(params: object) -> None:
        raise NotReady("the driver restarts", retry_after_s=2)

    monkeypatch.setattr(jobs, "create", away)
    answer = await client.post("/v1/videos", json={"prompt": "a"})
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "2")


FIELDS: dict[str, Any] = {
    "prompt": "ein größerer Kreis",
    "model": "wan",
    "size": "32x32",
    "seconds": "0.5",
    "num_frames": 9,
    "fps": 16,
    "num_inference_steps": 2,
    "guidance_scale": 1.5,
    "flow_shift": 3.0,
    "negative_prompt": "",
    "seed": 2**60,
    "max_sequence_length": 77,
    "outputs": ["sheet", "frames"],
}


async def test_multipart_equals_json(client: httpx.AsyncClient, jobs: FakeJobs):
    lists = {name: value if isinstance(value, list) else [value] for name, value in FIELDS.items()}
    parts = [(name, (None, str(item))) for name, items in lists.items() for item in items]
    assert (await client.post("/v1/videos", json=FIELDS)).status_code == 200
    assert (await client.post("/v1/videos", files=parts)).status_code == 200
    assert jobs.jobs["video_1"].params == jobs.jobs["video_2"].params


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("seed", "-1"),
        ("seed", "1.0"),
        ("seed", ""),
        ("guidance_scale", "NaN"),
        ("guidance_scale", "1e999"),
        ("num_frames", "null"),
        ("num_frames", "true"),
        ("fps", "[1]"),
        ("outputs", ""),
        ("prompt[]", "a"),
        ("x", "1"),
    ],
)
async def test_wrong_multipart_is_refused_like_json(client: httpx.AsyncClient, jobs: FakeJobs, name: str, value: str):
    answer = await client.post("/v1/videos", files=[("prompt", (None, "a")), (name, (None, value))])
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].startswith(name)
    assert jobs.created == 0


async def test_a_reference_image_is_refused_by_name(client: httpx.AsyncClient):
    answer = await client.post("/v1/videos", data={"prompt": "a"}, files={"input_reference": b"\x89PNG\xff"})
    assert answer.json()["error"]["param"] == "input_reference"
    assert "text alone" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "body", [{"prompt": "a", "nested": {"x": 1}}, {"prompt": {"text": "a"}}, {}, {"prompt": "\x00"}]
)
async def test_wrong_bodies_create_nothing(client: httpx.AsyncClient, jobs: FakeJobs, body: dict[str, Any]):
    answer = await client.post("/v1/videos", content=json.dumps(body), headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert jobs.created == 0
    assert (await client.post("/v1/videos", json={"prompt": "good"})).status_code == 200
