from __future__ import annotations

import httpx
import pytest

from tests.fake_jobs import FakeJobs

pytestmark = pytest.mark.anyio


async def test_ready_only_when_every_model_is(client: httpx.AsyncClient, jobs: FakeJobs):
    assert (await client.get("/ready")).json() == {"status": "ready", "models": ["wan"]}
    for models, reason in (({"wan": {"ready": False, "reason": "warming up"}}, "warming up"), ({}, "not started")):
        jobs.models = models  # type: ignore[assignment]
        answer = await client.get("/ready")
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "2")
        assert answer.json()["error"]["message"] == f"wan: {reason}"
        assert (await client.get("/health")).json() == {"status": "ok"}
