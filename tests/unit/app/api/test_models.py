from __future__ import annotations

import httpx
import pytest

pytestmark = pytest.mark.anyio


async def test_models(client: httpx.AsyncClient):
    listed = (await client.get("/v1/models")).json()
    assert listed["object"] == "list"
    (model,) = listed["data"]
    assert (await client.get("/v1/models/wan")).json() == model
    assert (model["id"], model["object"], model["created"]) == ("wan", "model", 1_700_000_000)
    assert (model["defaults"]["num_frames"], model["limits"]["max_frames"], model["flow_shift"]) == (17, 41, 3.0)
    assert model["fingerprint"] == "f" * 64


async def test_an_unknown_model(client: httpx.AsyncClient):
    answer = await client.get("/v1/models/sora-2")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
    assert '["wan"]' in answer.json()["error"]["message"]
