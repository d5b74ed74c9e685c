"""The endpoints of worlds over a fake driver: what is read, what is refused, what is shown."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator
from typing import Any

import imageio.v3 as iio
import numpy as np
import pytest
from starlette.testclient import TestClient

from app.api.application import make_app
from app.api.world_errors import WorldsFull
from app.config import Http
from deployments.lingbot.controls import ChunkControls, Keys
from tests.fake_jobs import FakeJobs
from tests.fake_worlds import BODY, PICTURE, PNG, FakeWorlds, surface


@pytest.fixture
def worlds() -> FakeWorlds:
    return FakeWorlds()


@pytest.fixture
def client(worlds: FakeWorlds) -> Iterator[TestClient]:
    jobs = FakeJobs()
    with TestClient(make_app(jobs, [], jobs.files, Http(), worlds=surface(worlds))) as client:
        yield client


def opened(client: TestClient, **fields: Any) -> str:
    answer = client.post("/v1/worlds", json={**BODY, **fields})
    assert answer.status_code == 200, answer.text
    return str(answer.json()["id"])


def controls(worlds: FakeWorlds, world: str) -> list[ChunkControls]:
    return worlds.worlds[world].controls


def test_json_and_a_form_with_a_file_mean_the_same(client: TestClient, worlds: FakeWorlds):
    by_json = client.post("/v1/worlds", json=BODY).json()
    form = {"prompt": BODY["prompt"], "seed": str(BODY["seed"])}
    by_form = client.post("/v1/worlds", data=form, files={"image": ("a.png", PNG)}).json()
    for name in ("prompt", "seed", "size", "model", "cache"):
        assert by_json[name] == by_form[name]
    assert (by_json["prompt"], by_json["seed"], by_json["size"]) == ("a room", 2**62, "48x32")
    assert all(np.array_equal(seen, PICTURE) for seen in worlds.images_seen)


def test_a_size_is_taken_as_it_is_and_a_seed_is_drawn(client: TestClient):
    world = client.post("/v1/worlds", json={**BODY, "size": "32x64", "seed": None}).json()
    assert world["size"] == "32x64"
    assert 0 <= world["seed"] < 2**53


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"image": None}, "image: got null"),
        ({"image": "***"}, "expected an image file in base64"),
        ({"image": base64.b64encode(b"GIF89a").decode()}, "expected a PNG, JPEG or WebP file"),
        ({"image": base64.b64encode(PNG[:200]).decode()}, "cannot be read"),
        ({"image": base64.b64encode(bytes(1 << 20) + b"1").decode()}, "got 1048577 bytes, at most 1048576"),
        ({"size": "80x80"}, "got 80x80 = 6400 pixels, at most 4096 allowed"),
        ({"size": "47x32"}, "multiples of 16"),
        ({"prompt": "x" * 51}, "got 51 characters, at most 50"),
        ({"prompt": "\x00"}, "NUL"),
        ({"seed": -1}, "seed: got -1"),
        ({"seed": 1.0}, "seed: got 1.0"),
        ({"cache": "on"}, "cache: got"),
        ({"fps": 3}, "fps: unknown field"),
        ({"model": "big"}, "expected one of"),
    ],
)
def test_bad_worlds_are_refused(fields: dict[str, Any], words: str, client: TestClient, worlds: FakeWorlds):
    answer = client.post("/v1/worlds", json={**BODY, **fields})
    assert answer.status_code in (400, 404)
    error = answer.json()["error"]
    assert words in error["message"]
    assert error["param"] == next(iter(fields))
    assert worlds.worlds == {}


def test_keys_have_one_name_in_the_path(client: TestClient, worlds: FakeWorlds):
    world = opened(client)
    client.post(f"/v1/worlds/{world}/chunks", json={"keys": ["left", "w"]}).raise_for_status()
    client.post(f"/v1/worlds/{world}/chunks", json={"keys": ["w", "j", "w"]}).raise_for_status()
    client.post(
        f"/v1/worlds/{world}/chunks",
        json={"moves": [{"keys": ["up"], "seconds": 0.125}, {"keys": ["d"], "frames": 1}], "prompt": "a  hall"},
    ).raise_for_status()
    first, second, third = controls(worlds, world)
    assert first.camera == Keys((frozenset("wj"),) * 4)
    assert second.camera == Keys((frozenset("wj"),) * 8)
    assert third == ChunkControls(Keys((*[frozenset("i")] * 2, frozenset("d"), *[frozenset()] * 5)), "a hall")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "keys"),
        ({"keys": ["w"], "moves": [{"keys": ["w"], "frames": 1}]}, "moves"),
        ({"keys": ["W"]}, "keys.0"),
        ({"keys": "w"}, "keys"),
        ({"keys": ["w"], "chunks": 0}, "chunks"),
        ({"keys": ["w"], "chunks": 4}, "chunks"),
        ({"poses": [np.eye(4).tolist()] * 2, "chunks": 1}, "chunks"),
        ({"moves": []}, "moves"),
        ({"moves": [{"keys": ["w"], "frames": 1, "seconds": 1}]}, "moves.0"),
        ({"moves": [{"keys": ["w"], "seconds": 0.1}]}, "moves.0.seconds"),
        ({"moves": [{"keys": ["w"], "frames": 25}]}, "moves"),
        ({"moves": [{"key": ["w"], "frames": 2}]}, "moves.0.keys"),
        ({"poses": [np.eye(4).tolist()] * 3}, "poses"),
        ({"poses": [np.eye(4).tolist()] * 8}, "poses"),
        ({"poses": [(2 * np.eye(4)).tolist()] * 2}, "poses"),
        ({"poses": [np.eye(3).tolist()] * 2}, "poses.0.0"),
        ({"keys": ["w"], "prompt": " "}, "prompt"),
        ({"keys": ["w"], "after": -1}, "after"),
        ({"keys": ["w"], "speed": 2}, "speed"),
    ],
)
def test_bad_chunks_are_refused(fields: dict[str, Any], param: str, client: TestClient, worlds: FakeWorlds):
    world = opened(client)
    answer = client.post(f"/v1/worlds/{world}/chunks", json=fields)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param, answer.text
    assert controls(worlds, world) == []


def test_numbers_that_are_none_are_refused(client: TestClient):
    world = opened(client)
    pose = json.dumps(np.eye(4).tolist()).replace("0.0", "NaN", 1)
    body = f'{{"poses": [{pose}, {pose}]}}'
    answer = client.post(f"/v1/worlds/{world}/chunks", content=body, headers={"Content-Type": "application/json"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "poses.0.0.1")


def test_content_is_the_chunks_frames(client: TestClient):
    world = opened(client)
    client.post(f"/v1/worlds/{world}/chunks", json={"keys": [], "chunks": 2}).raise_for_status()
    one = client.get(f"/v1/worlds/{world}/chunks/1/content", params={"variant": "frames"})
    assert np.load(io.BytesIO(one.content))["frames"].shape == (8, 32, 48, 3)
    whole = client.get(f"/v1/worlds/{world}/content", params={"variant": "frames"})
    frames = np.load(io.BytesIO(whole.content))["frames"]
    assert (frames.shape, frames[4].max(), frames[5].min()) == ((13, 32, 48, 3), 0, 20)
    video = client.get(f"/v1/worlds/{world}/content")
    assert video.headers["content-type"] == "video/mp4"
    assert iio.imread(io.BytesIO(video.content), extension=".mp4").shape == (13, 32, 48, 3)
    assert one.headers["etag"] != whole.headers["etag"]
    assert client.get(f"/v1/worlds/{world}/content", params={"variant": "gif"}).status_code == 400
    assert client.get(f"/v1/worlds/{world}/chunks/2/content").status_code == 404
    assert client.get(f"/v1/worlds/{world}/chunks/01/content").status_code == 404


def test_forks_and_rewinds(client: TestClient):
    world = opened(client)
    client.post(f"/v1/worlds/{world}/chunks", json={"keys": [], "chunks": 2}).raise_for_status()
    fork = client.post(f"/v1/worlds/{world}/fork", json={"chunks": 1}).json()
    assert (fork["chunks"], fork["parent"]) == (1, {"world": world, "chunks": 1})
    assert client.post(f"/v1/worlds/{world}/rewind", json={"chunks": 0}).json()["chunks"] == 0
    assert client.post(f"/v1/worlds/{world}/fork", json={"chunks": 1}).status_code == 409
    assert client.post(f"/v1/worlds/{world}/fork", json={}).status_code == 400
    assert client.post(f"/v1/worlds/{world}/park", json={"now": True}).status_code == 400
    listed = client.get("/v1/worlds", params={"limit": 1, "order": "asc"}).json()
    assert ([w["id"] for w in listed["data"]], listed["has_more"]) == ([world], True)
    assert client.get("/v1/worlds", params={"after": "world_x"}).json()["error"]["param"] == "after"


def test_a_full_server_says_when_to_come_back(client: TestClient, worlds: FakeWorlds):
    world = opened(client)
    worlds.error = WorldsFull("17 requests wait", retry_after_s=1.2)
    answer = client.post(f"/v1/worlds/{world}/chunks", json={"keys": ["w"]})
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "2")


def test_models_and_readiness_include_worlds(client: TestClient):
    (model,) = client.get("/v1/models").json()["data"]
    assert (model["id"], model["kind"], model["stream"]["chunk"]) == ("small", "world", 2)
    assert client.get("/ready").json()["models"] == ["small"]
