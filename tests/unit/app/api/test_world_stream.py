"""The WebSocket of a world over a fake driver."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient, WebSocketTestSession
from starlette.websockets import WebSocketDisconnect

from app.api.application import make_app
from app.api.world_errors import ChunkFailed
from app.config import Http
from deployments.lingbot.controls import Keys
from tests.fake_jobs import FakeJobs
from tests.fake_worlds import BODY, FakeWorlds, surface


@pytest.fixture
def worlds() -> FakeWorlds:
    return FakeWorlds()


@pytest.fixture
def client(worlds: FakeWorlds) -> Iterator[TestClient]:
    jobs = FakeJobs()
    with TestClient(make_app(jobs, [], jobs.files, Http(), worlds=surface(worlds))) as client:
        yield client


def opened(client: TestClient) -> str:
    return str(client.post("/v1/worlds", json=BODY).json()["id"])


def chunk(socket: WebSocketTestSession) -> tuple[dict[str, Any], list[bytes]]:
    receipt = socket.receive_json()
    return receipt, [socket.receive_bytes() for _ in range(receipt.get("images", 0))]


def test_chunks_come_in_order_each_with_its_frames(client: TestClient):
    world = opened(client)
    with client.websocket_connect(f"/v1/worlds/{world}/stream?frames=png") as socket:
        socket.send_json({"type": "chunk", "keys": ["w"]})
        socket.send_json({"type": "chunk", "keys": ["a"], "chunks": 2})
        found = [chunk(socket) for _ in range(3)]
    assert [receipt["index"] for receipt, _ in found] == [0, 1, 2]
    assert [len(images) for _, images in found] == [5, 8, 8]
    assert found[1][1][3] == b"png 1 3"
    assert set(found[0][0]["timings"]) == {"waited", "model", "total"}


def test_receipts_alone(client: TestClient):
    world = opened(client)
    with client.websocket_connect(f"/v1/worlds/{world}/stream?frames=none") as socket:
        socket.send_json({"type": "chunk", "keys": []})
        socket.send_json({"type": "chunk", "keys": []})
        assert [socket.receive_json()["index"] for _ in range(2)] == [0, 1]


def test_what_is_wrong_is_told_and_the_connection_goes_on(client: TestClient, worlds: FakeWorlds):
    world = opened(client)
    wrong = [
        ("{", "body"),
        (json.dumps({"type": "jump"}), "type: got"),
        (json.dumps({"type": "chunk", "keys": ["x"]}), "keys.0"),
        (json.dumps({"type": "hold"}), "hold: expected"),
        (json.dumps({"type": "play", "speed": 2}), "speed: unknown field"),
    ]
    with client.websocket_connect(f"/v1/worlds/{world}/stream?frames=none") as socket:
        for text, words in wrong:
            socket.send_text(text)
            answer = socket.receive_json()
            assert answer["type"] == "error"
            assert words in answer["error"]["message"]
        worlds.error = ChunkFailed("the gang broke")
        socket.send_json({"type": "chunk", "keys": []})
        assert socket.receive_json()["error"]["code"] == "chunk_failed"
        socket.send_json({"type": "chunk", "keys": []})
        assert socket.receive_json()["index"] == 0


def test_a_playing_world_follows_the_held_keys_no_faster_than_it_is_watched(client: TestClient, worlds: FakeWorlds):
    world = opened(client)
    with client.websocket_connect(f"/v1/worlds/{world}/stream?frames=none") as socket:
        socket.send_json({"type": "hold", "keys": ["up"]})
        socket.send_json({"type": "play"})
        began = time.monotonic()
        for index in range(4):
            assert socket.receive_json()["index"] == index
        took = time.monotonic() - began
        socket.send_json({"type": "pause"})
    made = worlds.worlds[world].controls
    assert all(c.camera.frames[0] == {"i"} for c in made if isinstance(c.camera, Keys))
    # 5 + 8 + 8 frames are shown before the fourth chunk's turn, one chunk of which it may come early: 13/16 s.
    assert took > 0.7


def test_a_connection_that_cannot_be_served_is_closed_with_the_reason(client: TestClient):
    for path, code in (
        ("world_x/stream", "world_not_found"),
        ("world_x/stream?frames=gif", "invalid_value"),
        ("world_x/stream?fps=3", "unknown_field"),
    ):
        with client.websocket_connect(f"/v1/worlds/{path}") as socket:
            assert socket.receive_json()["error"]["code"] == code
            with pytest.raises(WebSocketDisconnect) as closed:
                socket.receive_json()
            assert closed.value.code == 1008
