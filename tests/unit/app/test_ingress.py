"""The ingress on a real local Serve instance, in front of a fake driver in its own process."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
import ray
from app.config import Http
from app.ingress import VideoIngress
from ray import serve

from tests.fake_jobs import MP4, AnyVideo, FakeJobs, card


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    port = free_port()
    root = Path(__file__).parents[3]
    ray.init(
        address="local",
        num_cpus=1,
        include_dashboard=False,
        object_store_memory=80 * 2**20,  # Ray's minimum is 75 MiB
        _temp_dir=str(tmp_path_factory.mktemp("r")),
        runtime_env={"env_vars": {"PYTHONPATH": str(root)}},
        log_to_driver=False,
    )
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    options = {"ray_actor_options": {"num_cpus": 0.1}, "max_ongoing_requests": 50}
    driver = serve.deployment(FakeJobs, name="driver", **options).bind(pace_s=0.2)
    ingress = serve.deployment(serve.ingress()(VideoIngress), name="ingress", **options)
    serve.run(ingress.bind(driver, [card()], AnyVideo(), Http(max_body_bytes=1024)), name="worldstage")
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:
        yield client
    serve.shutdown()
    ray.shutdown()


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "did not happen within 20 s"
        time.sleep(0.05)


def newest(client: httpx.Client) -> dict[str, str]:
    (video,) = client.get("/v1/videos?limit=1").json()["data"]
    return video


def test_state_arrives_through_the_constructor(client: httpx.Client):
    assert client.get("/ready").json() == {"status": "ready", "models": ["wan"]}
    assert client.get("/v1/models").json()["data"][0]["id"] == "wan"


def test_the_driver_s_own_errors_cross_both_processes(client: httpx.Client):
    answer = client.get("/v1/videos/video_99")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "video_not_found")
    answer = client.get("/v1/videos/video_99/events")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "video_not_found")


def test_errors_without_reading_the_body(client: httpx.Client):
    answer = client.post("/v1/videos", content=b"x" * 5000, headers={"content-type": "application/json"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")


def test_events_come_as_they_happen(client: httpx.Client):
    made = client.post("/v1/videos", json={"prompt": "a"}).json()
    times, phases = [], []
    with client.stream("GET", f"/v1/videos/{made['id']}/events") as answer:
        for line in answer.iter_lines():
            if line.startswith("data: "):
                times.append(time.monotonic())
                phases.append(json.loads(line[6:])["phase"])
    assert phases == ["queued", "encoding", "denoising", "decoding", "completed"]
    assert times[-1] - times[0] > 0.4  # four changes 0.2 s apart; one buffered answer would bring them together


def test_sync_answers_with_the_file(client: httpx.Client):
    answer = client.post("/v1/videos/sync", json={"prompt": "a"})
    assert (answer.status_code, answer.content) == (200, MP4)
    part = client.get(f"/v1/videos/{answer.headers['x-job-id']}/content", headers={"Range": "bytes=1-2"})
    assert (part.status_code, part.content) == (206, MP4[1:3])


def test_a_closed_sync_connection_cancels_the_job(client: httpx.Client):
    before = newest(client)["id"]

    def leave() -> None:
        with pytest.raises(httpx.ReadTimeout):
            client.post("/v1/videos/sync", json={"prompt": "a"}, timeout=0.5)  # the job takes 0.8 s

    leaving = threading.Thread(target=leave)
    leaving.start()
    leaving.join()
    until(lambda: newest(client)["id"] != before)
    job = newest(client)["id"]
    until(lambda: client.get(f"/v1/videos/{job}").json()["status"] == "cancelled")
