"""The ingress on a real local Serve instance, in front of a fake driver in its own process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
import ray
from ray import serve
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayTaskError
from ray.serve._private.common import DeploymentID
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError

from app.api.errors import NotReady, QueueFull, UnknownJob
from app.config import Http
from app.ingress import HandleJobs, VideoIngress
from tests.fake_jobs import MP4, STAY, AnyVideo, FakeJobs, card


def free_port() -> int:
    """Below Linux's ephemeral ports (32768 and up), of which Ray's own processes take many while Serve starts."""
    for port in random.sample(range(20000, 32000), 50):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise RuntimeError("50 ports between 20000 and 32000 are all in use")


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


class Handle:
    """A deployment handle whose every call ends in one way; the only part of Serve that HandleJobs touches."""

    def __init__(self, outcome: BaseException | None) -> None:
        self._outcome = outcome

    def __getattr__(self, method: str) -> Handle:
        return self

    async def remote(self, *args: object) -> None:
        if self._outcome is None:
            await asyncio.sleep(60)
        else:
            raise self._outcome


@pytest.mark.parametrize(
    ("outcome", "error"),
    [
        (RayTaskError("get", "traceback", UnknownJob("no video", "video_id")), UnknownJob),
        (RayTaskError("get", "traceback", KeyError("a fault")), RayTaskError),
        (ActorDiedError(), NotReady),
        (ActorUnavailableError("away", None), NotReady),
        (DeploymentUnavailableError(DeploymentID(name="driver")), NotReady),
        (BackPressureError(num_queued_requests=5, max_queued_requests=5), QueueFull),
        (None, NotReady),  # no driver is up: Serve would wait for ever
    ],
)
def test_what_a_handle_raises(outcome: BaseException | None, error: type[Exception]):
    jobs = HandleJobs(Handle(outcome), answer_s=0.05)  # type: ignore[arg-type]
    with pytest.raises(error) as caught:
        asyncio.run(jobs.get("video_1"))
    if isinstance(caught.value, NotReady | QueueFull):
        assert caught.value.retry_after_s == 2.0


def test_creating_and_cancelling_outlive_the_request():
    done: list[str] = []

    class Slow(Handle):
        def __getattr__(self, method: str) -> Slow:
            self.method = method
            return self

        async def remote(self, *args: object) -> None:
            await asyncio.sleep(0.05)
            done.append(self.method)

    async def leave() -> None:
        for method, argument in (("create", None), ("cancel", "video_1"), ("get", "video_1")):
            request = asyncio.create_task(getattr(HandleJobs(Slow(None)), method)(argument))  # type: ignore[arg-type]
            await asyncio.sleep(0.01)
            request.cancel()
        await asyncio.sleep(0.2)

    asyncio.run(leave())
    assert done == ["create", "cancel"]


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
            client.post("/v1/videos/sync", json={"prompt": STAY}, timeout=0.5)

    leaving = threading.Thread(target=leave)
    leaving.start()
    leaving.join()
    until(lambda: newest(client)["id"] != before)
    job = newest(client)["id"]
    until(lambda: client.get(f"/v1/videos/{job}").json()["status"] == "cancelled")
