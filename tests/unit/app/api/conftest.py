"""An application over a fake driver, and an HTTP client of it."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import pytest
from fastapi import FastAPI

from app.api.application import make_app
from app.config import Http
from tests.fake_jobs import FakeJobs, card


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def jobs() -> FakeJobs:
    return FakeJobs()


@pytest.fixture
def app(jobs: FakeJobs) -> FastAPI:
    return make_app(jobs, [card()], jobs.files, Http(max_body_bytes=4096), heartbeat_s=0.05)


@pytest.fixture
async def client(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://test") as client:
        yield client
