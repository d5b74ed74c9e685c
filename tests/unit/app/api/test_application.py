from __future__ import annotations

import logging

import httpx
import pytest

from app.api.application import UnexpectedErrors
from tests.fake_jobs import FakeJobs

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("path", ["/", "/v1", "/v1/videos/", "/v1/video", "/v1/videos/a/b", "/docs", "/v1/%00"])
async def test_unknown_paths(client: httpx.AsyncClient, path: str):
    answer = await client.get(path)
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "unknown_path")


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("PUT", "/v1/videos", "GET, POST"),
        ("PATCH", "/v1/videos/video_1", "DELETE, GET"),
        ("GET", "/v1/videos/video_1/cancel", "POST"),
        ("POST", "/health", "GET"),
        ("PUT", "/v1/videos/sync", "POST"),
        ("TRACE", "/v1/models", "GET"),
    ],
)
async def test_wrong_methods(client: httpx.AsyncClient, method: str, path: str, allowed: str):
    answer = await client.request(method, path)
    assert (answer.status_code, answer.headers["allow"]) == (405, allowed)
    assert answer.json()["error"]["code"] == "method_not_allowed"


async def test_an_unexpected_fault_is_an_id_for_the_client_and_a_traceback_for_us(
    client: httpx.AsyncClient,
    jobs: FakeJobs,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    async def broken(job_id: str) -> None:
        raise RuntimeError("secret inside")

    monkeypatch.setattr(jobs, "get", broken)
    with caplog.at_level(logging.ERROR):
        answer = await client.get("/v1/videos/video_1")
    assert answer.status_code == 500
    error = answer.json()["error"]
    assert (error["type"], error["code"]) == ("server_error", "internal_error")
    assert "secret" not in answer.text
    (record,) = [record for record in caplog.records if record.name == "app.api.application"]
    assert answer.headers["x-error-id"] in record.message
    assert answer.headers["x-error-id"] in error["message"]
    assert "secret inside" in (record.exc_text or "")


async def test_a_fault_behind_the_first_byte_breaks_the_connection():
    async def half(scope: object, receive: object, send: object) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})  # type: ignore[operator]
        raise RuntimeError("late")

    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app=UnexpectedErrors(half)), base_url="http://t"
    ) as client:
        with pytest.raises(RuntimeError, match="late"):
            await client.get("/")
