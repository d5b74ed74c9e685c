"""Worlds from the running application: a gang of two stages, a window that drops frames, and what kills them."""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import imageio.v3 as iio
import numpy as np
import pytest
import websockets

from tests.e2e.worlds import ANSWER_S, Client, image
from tests.serving import ROOT, Serving, config, serving, wait_until

pytestmark = pytest.mark.timeout(900)  # the first test also waits for the application to start

CHUNK, WINDOW, SINK = 2, 5, 1
PARK_AFTER_S = 10.0
PAGE = ROOT / "docs/worlds.md"
PATH: list[dict[str, Any]] = [
    {"keys": ["w"]},
    {"keys": ["left", "w"]},
    {"keys": ["d"], "prompt": "a red room in the rain"},
    {"moves": [{"keys": ["s"], "frames": 3}, {"keys": ["up"], "seconds": 0.25}]},
    {"keys": []},
]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """`small-world`: two stages, two windows in memory."""
    place = {"cpus": 0.05, "threads": 1}
    model = {
        "name": "small-world",  # as in the demo config: the examples of docs/worlds.md are run against it
        "checkpoint": "random:small",
        "dtype": "float32",
        "stream": {"chunk": CHUNK, "window": WINDOW, "sink": SINK},
        "topology": {"pp": 2},
        "ranks": place,
        "text_encoder": place,
        "decoder": place,
        "default_pixels": 32 * 48,
        "limits": {"max_pixels": 64 * 64, "max_chunks": 12, "max_request_chunks": 4},
        "sessions": {"live": 2, "kv_gib": 0.01, "decoders": 2, "park_after_s": PARK_AFTER_S},
    }
    worlds = {"models": [model], "cache": {"root": "cache", "budget_gib": 0.1}, "max_waiting": 2}
    with serving(config([], worlds=worlds), tmp_path_factory.mktemp("worlds")) as served:
        yield served


@pytest.fixture
def client(served: Serving) -> Client:
    return Client(served)


@pytest.fixture(scope="module")
def cold(served: Serving) -> list[np.ndarray]:
    """Frames of PATH in a world that nothing has happened to."""
    return Client(served).cold(PATH)


def test_three_chunks_with_keys_become_a_video(client: Client):
    world = client.open()
    receipts = client.walk(world, PATH[:3])
    assert [r["frames"] for r in receipts] == [5, 8, 8]
    assert [(r["index"], r["source"], r["fast_forward_k"]) for r in receipts] == [(n, "generated", 0) for n in range(3)]
    content = client.ask("GET", f"/v1/worlds/{world}/content").content
    assert iio.imread(io.BytesIO(content), extension=".mp4").shape == (21, 32, 48, 3)
    one = client.ask("GET", f"/v1/worlds/{world}/chunks/1/content").content
    assert iio.imread(io.BytesIO(one), extension=".mp4").shape == (8, 32, 48, 3)
    whole = client.ask("GET", f"/v1/worlds/{world}/content", params={"variant": "frames"}).content
    frames = [client.frames(world, chunk) for chunk in range(3)]
    assert np.array_equal(np.load(io.BytesIO(whole))["frames"], np.concatenate(frames))
    assert len({frame.tobytes() for part in frames for frame in part}) == 21
    found = client.ask("GET", f"/v1/worlds/{world}").json()
    assert (found["chunks"], found["frames"], found["size"], found["parked"]) == (3, 21, "48x32", False)


def test_poses_and_keys_that_mean_the_same_camera_make_the_same_first_frames(client: Client):
    """Standing still, in keys and in poses: other controls, so other keys, but the same camera."""
    eye = np.eye(4).tolist()
    by_keys, by_poses = client.open(), client.open()
    a = client.move(by_keys, 0, keys=[])[0]
    b = client.move(by_poses, 0, poses=[eye] * CHUNK)[0]
    assert a["key"] != b["key"]
    assert np.array_equal(client.frames(by_keys, 0), client.frames(by_poses, 0))


def test_fork_and_rewind_equal_cold_worlds(client: Client, cold: list[np.ndarray]):
    world = client.open()
    client.walk(world, PATH[:4])
    other = [{"keys": ["a"]}, {"keys": ["right"]}]
    fork = client.ask("POST", f"/v1/worlds/{world}/fork", json={"chunks": 2}).json()
    assert (fork["chunks"], fork["parent"]) == (2, {"world": world, "chunks": 2})
    client.walk(fork["id"], other, start=2)
    rewound = client.ask("POST", f"/v1/worlds/{world}/rewind", json={"chunks": 1}).json()
    assert (rewound["chunks"], rewound["frames"]) == (1, 5)
    assert client.ask("GET", f"/v1/worlds/{world}/chunks/1").status_code == 404
    client.walk(world, PATH[1:], start=1)
    client.assert_equal(world, cold)
    client.assert_equal(fork["id"], client.cold([*PATH[:2], *other]))
    assert not np.array_equal(client.frames(fork["id"], 2), cold[2])


def test_a_parked_world_comes_back_exactly(client: Client, cold: list[np.ndarray]):
    world = client.open()
    client.walk(world, PATH[:3])
    assert client.ask("POST", f"/v1/worlds/{world}/park").json()["parked"]
    assert not client.ask("POST", f"/v1/worlds/{world}/resume").json()["parked"]
    (receipt,) = client.walk(world, PATH[3:4], start=3)
    assert (receipt["restored"], receipt["replayed"]) == (None, 0)  # resume had done it
    client.ask("POST", f"/v1/worlds/{world}/park")
    (receipt,) = client.walk(world, PATH[4:], start=4)
    assert receipt["restored"] or receipt["replayed"]
    client.assert_equal(world, cold)


def test_an_idle_world_is_parked_and_goes_on_exactly(client: Client, cold: list[np.ndarray]):
    world = client.open()
    client.walk(world, PATH[:4])

    def parked() -> bool:
        return bool(client.ask("GET", f"/v1/worlds/{world}").json()["parked"])

    assert not parked()
    wait_until(parked, PARK_AFTER_S + 30, "the world to be parked")
    client.walk(world, PATH[4:], start=4)
    client.assert_equal(world, cold)


def test_more_worlds_than_windows_take_turns_exactly(client: Client, cold: list[np.ndarray]):
    """Three worlds on a gang with two windows, interleaved."""
    worlds = [client.open() for _ in range(3)]
    for chunk in range(len(PATH)):
        for world in worlds:
            client.move(world, chunk, **PATH[chunk])
    for world in worlds:
        client.assert_equal(world, cold, start=len(PATH) - 1)


def test_a_request_that_is_repeated_makes_nothing_twice(client: Client):
    world = client.open()
    first = client.move(world, 0, keys=["w"], chunks=2)
    assert client.move(world, 0, keys=["w"], chunks=2) == first
    longer = client.move(world, 0, keys=["w"], chunks=3)
    assert [c["key"] for c in longer[:2]] == [c["key"] for c in first]
    answer = client.ask("POST", f"/v1/worlds/{world}/chunks", json={"after": 1, "keys": ["s"]})
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "world_moved_on")
    assert client.ask("POST", f"/v1/worlds/{world}/chunks", json={"after": 9, "keys": ["s"]}).status_code == 409
    assert client.ask("GET", f"/v1/worlds/{world}").json()["chunks"] == 3
    too_long = client.ask("POST", f"/v1/worlds/{world}/chunks", json={"keys": ["w"], "chunks": 4})
    assert too_long.status_code == 200
    client.move(world, 7, keys=["w"], chunks=4)
    assert client.ask("POST", f"/v1/worlds/{world}/chunks", json={"keys": ["w"], "chunks": 2}).status_code == 409


def test_worlds_that_begin_alike_share_chunks(client: Client, cold: list[np.ndarray]):
    first = client.open(cache="auto")
    client.walk(first, PATH)
    keys = [c["key"] for c in client.ask("GET", f"/v1/worlds/{first}/chunks").json()["data"]]

    def shared() -> bool:
        probe = client.open(cache="auto")
        receipts = client.walk(probe, PATH)
        client.ask("DELETE", f"/v1/worlds/{probe}")
        return [r["source"] for r in receipts] == ["cache"] * len(PATH)

    wait_until(shared, 60, "every chunk to be shared")
    again = client.open(cache="auto")
    receipts = client.walk(again, PATH)
    assert [r["key"] for r in receipts] == keys
    assert [r["fast_forward_k"] for r in receipts] == [1, 2, 3, 4, 5]
    client.assert_equal(again, cold)
    fork = client.open(cache="auto")
    other = [*PATH[:3], {"keys": ["a"]}]
    receipts = client.walk(fork, other)
    assert [r["fast_forward_k"] for r in receipts] == [1, 2, 3, 3]
    assert receipts[3]["source"] == "generated"
    client.assert_equal(fork, client.cold(other))
    assert client.walk(client.open(cache="auto", seed=6), PATH[:1])[0]["source"] == "generated"
    assert client.walk(client.open(cache="auto", image=image(1)), PATH[:1])[0]["source"] == "generated"


def test_bad_requests_are_refused_with_the_field(client: Client):
    world = client.open()
    bad: list[tuple[str, dict[str, Any], int, str | None]] = [
        ("", {"prompt": "a"}, 400, "image"),
        ("", {"prompt": "a", "image": "!"}, 400, "image"),
        ("", {"prompt": "a", "image": "aGVsbG8="}, 400, "image"),
        ("", {"prompt": " ", "image": image()}, 400, "prompt"),
        ("", {"prompt": "a", "image": image(), "size": "65x48"}, 400, "size"),
        ("", {"prompt": "a", "image": image(), "size": "128x128"}, 400, "size"),
        ("", {"prompt": "a", "image": image(), "model": "other"}, 404, "model"),
        ("", {"prompt": "a", "image": image(), "frames": 3}, 400, "frames"),
        (f"/{world}/chunks", {}, 400, "keys"),
        (f"/{world}/chunks", {"keys": ["x"]}, 400, "keys.0"),
        (f"/{world}/chunks", {"keys": ["w"], "poses": []}, 400, "poses"),
        (f"/{world}/chunks", {"keys": ["w"], "chunks": 5}, 400, "chunks"),
        (f"/{world}/chunks", {"moves": [{"keys": ["w"]}]}, 400, "moves.0"),
        (f"/{world}/chunks", {"moves": [{"keys": ["w"], "seconds": 0.1}]}, 400, "moves.0.seconds"),
        (f"/{world}/chunks", {"poses": [np.eye(4).tolist()]}, 400, "poses"),
        (f"/{world}/chunks", {"poses": [np.zeros((4, 4)).tolist()] * 2}, 400, "poses"),
        (f"/{world}/fork", {"chunks": 1}, 409, "chunks"),
        (f"/{world}/rewind", {"chunks": -1}, 400, "chunks"),
        ("/world_none/chunks", {"keys": ["w"]}, 404, None),
    ]
    for path, body, status, param in bad:
        answer = client.ask("POST", f"/v1/worlds{path}", json=body)
        assert answer.status_code == status, (path, body, answer.text)
        if param is not None:
            assert answer.json()["error"]["param"] == param, answer.text
    assert client.ask("GET", f"/v1/worlds/{world}/chunks/0").status_code == 404
    assert client.ask("GET", f"/v1/worlds/{world}/content").status_code == 404
    assert client.ask("GET", f"/v1/worlds/{world}").json()["chunks"] == 0


def test_a_deleted_world_is_gone(client: Client, served: Serving):
    world = client.open()
    client.walk(world, PATH[:1])
    listed = [w["id"] for w in client.ask("GET", "/v1/worlds", params={"limit": 100}).json()["data"]]
    assert world in listed
    files = served.folder / "worldstage-data/results" / world
    assert files.exists()
    assert client.ask("DELETE", f"/v1/worlds/{world}").json()["deleted"]
    assert client.ask("GET", f"/v1/worlds/{world}").status_code == 404
    assert not files.exists() or not any(files.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["rank 1 small-world", "rank 0 small-world", "world-driver", "vae small-world", "world-cache"]
)
def test_a_world_survives_the_loss_of(kind: str, client: Client, served: Serving, cold: list[np.ndarray]):
    """While it is at work on a request for several chunks."""
    world = client.open(cache="auto" if kind == "world-cache" else "off")
    client.walk(world, PATH[:2])
    killed = served.pid(kind)
    with ThreadPoolExecutor(1) as user:
        walk = user.submit(Client(served).walk, world, PATH[2:], 2)
        wait_until(lambda: walk.done() or client.ask("GET", f"/v1/worlds/{world}").json()["busy"], 30, "work to begin")
        served.kill(kind)
        began = time.monotonic()
        walk.result()
    print(f"\nkilled {kind}: all chunks after {time.monotonic() - began:.1f} s")
    client.assert_equal(world, cold)
    wait_until(lambda: served.pid_or_none(kind) not in (None, killed), ANSWER_S, f"another {kind}")


def test_a_client_steers_a_world_over_a_websocket(client: Client, served: Serving, cold: list[np.ndarray]):
    world = client.open()
    address = served.base_url.replace("http", "ws", 1)

    async def steer() -> tuple[list[dict[str, Any]], list[list[bytes]], list[float], float]:
        began = time.monotonic()
        async with websockets.connect(f"{address}/v1/worlds/{world}/stream?frames=png", max_size=None) as socket:
            for fields in PATH:
                await socket.send(json.dumps({"type": "chunk", **fields}))
            receipts, images, arrivals = [], [], []
            for _ in PATH:
                receipts.append(json.loads(await socket.recv()))
                images.append([bytes(await socket.recv()) for _ in range(receipts[-1]["images"])])
                arrivals.append(time.monotonic())
            await socket.send(json.dumps({"type": "chunk", "keys": ["x"]}))
            refused = json.loads(await socket.recv())
            assert (refused["type"], refused["error"]["param"]) == ("error", "keys.0")
            await socket.send(json.dumps({"type": "hold", "keys": ["w"]}))
            await socket.send(json.dumps({"type": "play"}))
            for chunk in range(3):
                receipt = json.loads(await socket.recv())
                assert receipt["index"] == len(PATH) + chunk
                for _ in range(receipt["images"]):
                    await socket.recv()
            await socket.send(json.dumps({"type": "pause"}))
        return receipts, images, arrivals, began

    receipts, images, arrivals, began = asyncio.run(steer())
    for chunk, files in enumerate(images):
        decoded = np.stack([iio.imread(file, extension=".png") for file in files])
        assert np.array_equal(decoded, cold[chunk]), f"chunk {chunk}"
    gaps = np.diff(arrivals)
    playing = [r["frames"] / 16 for r in receipts[1:]]
    stalls = sum(float(max(0, gap - play)) for gap, play in zip(gaps, playing, strict=True))
    print(
        f"\nfirst chunk after {arrivals[0] - began:.3f} s; gaps {np.round(gaps, 3).tolist()} s, "
        f"longest {gaps.max():.3f} s; stalled {stalls:.3f} s at 16 fps"
    )
    assert [r["type"] for r in receipts] == ["chunk"] * len(PATH)
    assert all(r["timings"]["total"] > 0 for r in receipts)


@pytest.mark.parametrize("language", ["sh", "python"])
def test_the_examples_of_the_user_page_work_as_written(language: str, served: Serving, tmp_path: Path):
    """But for the address, which is a free port here."""
    blocks = re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    code = max(blocks, key=len).replace("127.0.0.1:8000", served.base_url.removeprefix("http://"))
    (tmp_path / "configs").mkdir()
    shutil.copy(ROOT / "configs/demo-world.png", tmp_path / "configs")
    command = ["bash", "-e", "-c", code] if language == "sh" else [sys.executable, "-c", code]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env={**os.environ, "PATH": path})
    assert done.returncode == 0, done.stderr
    if language == "sh":
        assert len(iio.imread(tmp_path / "world.mp4")) == 21
    else:
        assert "chunk 4" in done.stdout


def test_a_stream_of_no_world_is_closed_with_the_reason(served: Serving):
    address = served.base_url.replace("http", "ws", 1)

    async def connect(path: str) -> dict[str, Any]:
        async with websockets.connect(f"{address}{path}") as socket:
            error: dict[str, Any] = json.loads(await socket.recv())
            with pytest.raises(websockets.ConnectionClosed):
                await socket.recv()
            return error

    assert asyncio.run(connect("/v1/worlds/world_none/stream"))["error"]["code"] == "world_not_found"
    assert asyncio.run(connect("/v1/worlds/world_none/stream?frames=gif"))["error"]["param"] == "frames"
