"""docs/contracts/caches.md against the routes of a server with the latent cache, and a client of them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.api.application import make_app
from app.api.latent_cache import PinRequest, PurgeRequest
from app.config import Http
from cache_actors.blob_store import Pin
from tests.fake_jobs import FakeJobs, card
from tests.latents import ask, identity, opened, save
from tests.near_cache import Near

pytestmark = pytest.mark.anyio
PAGE = (Path(__file__).parents[2] / "docs" / "contracts" / "caches.md").read_text(encoding="utf-8")


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def near(tmp_path: Path) -> Near:
    return Near(opened(tmp_path, {}))


@pytest.fixture
async def client(near: Near) -> Any:
    jobs = FakeJobs()
    app = make_app(jobs, [card()], jobs.files, Http(), latent_cache=near)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://test") as client:
        yield client


async def test_endpoints_and_their_statuses(client: httpx.AsyncClient) -> None:
    text = re.search(r"^## Endpoints\n(.*?)(?=^## )", PAGE, re.MULTILINE | re.DOTALL)
    assert text is not None
    rows = [line.strip("|").split("|") for line in text[1].splitlines() if line.startswith("| ")][1:]
    page = {(r[0].strip(), r[1].strip(" `")): set(r[3].split()) for r in rows}
    schema = (await client.get("/openapi.json")).json()
    code = {
        (method.upper(), path): set(operation["responses"])
        for path, operations in schema["paths"].items()
        for method, operation in operations.items()
        if path.startswith("/v1/caches")
    }
    assert page == code
    purge, pin = (row[2] for row in rows if row[1].strip().endswith(("purge`", "/pin`")) and row[0].strip() != "DELETE")
    named = set(re.findall(r"`(\w+)`", pin)), set(re.findall(r"`(\w+)`", purge))
    assert {frozenset(names) for names in named} == {
        frozenset(PinRequest.model_fields),
        frozenset(PurgeRequest.model_fields),
    }


async def test_a_server_without_the_cache_has_none_of_them() -> None:
    jobs = FakeJobs()
    paths = make_app(jobs, [card()], jobs.files, Http()).openapi()["paths"]
    assert not [path for path in paths if "cache" in path]


async def test_stats_are_what_the_cache_counts(client: httpx.AsyncClient, near: Near) -> None:
    save(near.cache, identity())
    ask(near.cache, identity())
    shown = (await client.get("/v1/caches/latent")).raise_for_status().json()
    assert shown == near.cache.stats()
    assert shown["lookups"] == [{"level": 0, "decision": "hit", "reason": None, "count": 1}]


async def test_entries_page_by_page_without_their_prompts(client: httpx.AsyncClient, near: Near) -> None:
    for seed in range(3):
        save(near.cache, identity(seed=seed), donors={}, state=None)
    first = (await client.get("/v1/caches/latent/entries?limit=2&kind=result")).json()
    assert (len(first["data"]), first["has_more"]) == (2, True)
    second = (await client.get(f"/v1/caches/latent/entries?limit=2&kind=result&after={first['last_id']}")).json()
    assert (len(second["data"]), second["has_more"]) == (1, False)
    assert {entry["seed"] for entry in (*first["data"], *second["data"])} == {0, 1, 2}
    assert "prompt" not in first["data"][0]
    assert (await client.get("/v1/caches/latent/entries?tenant=other")).json()["data"] == []
    gone = (await client.get("/v1/caches/latent/entries?after=nothing")).json()["error"]
    assert (gone["code"], gone["param"]) == ("entry_not_found", "after")


async def test_pin_delete_purge(client: httpx.AsyncClient, near: Near) -> None:
    save(near.cache, identity())
    name = (await client.get("/v1/caches/latent/entries?kind=donor")).json()["first_id"]
    path = f"/v1/caches/latent/entries/{name}"
    pinned = (await client.put(f"{path}/pin", json={"owner": "me", "seconds": 60})).raise_for_status().json()
    assert pinned["pin"]["owner"] == "me"
    assert isinstance(near.cache._named(name).pin, Pin)
    assert (await client.delete(f"{path}/pin")).json()["pin"] is None
    for body, field in (({"owner": "me"}, "seconds"), ({"owner": "", "seconds": 1}, "owner"), ({"x": 1}, "x")):
        assert (await client.put(f"{path}/pin", json=body)).json()["error"]["param"] == field
    assert (await client.put("/v1/caches/latent/entries/no/pin", json={"owner": "a", "seconds": 1})).status_code == 404
    assert (await client.delete(path)).json() == {"id": name, "object": "latent_cache.entry.deleted", "deleted": True}
    assert (await client.delete(path)).status_code == 404
    dry = (await client.post("/v1/caches/latent/purge", json={"kind": "state", "dry_run": True})).json()
    assert (len(dry["entries"]), dry["dry_run"]) == (1, True)
    assert len((await client.post("/v1/caches/latent/purge", json={"tenant": "other"})).json()["entries"]) == 0
    assert len((await client.post("/v1/caches/latent/purge", json={})).json()["entries"]) == 2
    assert near.cache.stats()["entries"] == {}


async def test_a_cache_that_is_away_is_503_with_retry_after(client: httpx.AsyncClient, near: Near) -> None:
    near.away = True
    answer = await client.get("/v1/caches/latent")
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "2")
