"""A run of many jobs during which processes are killed, and what must hold afterwards."""

from __future__ import annotations

import io
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import httpx
import imageio.v3 as iio

from tests.serving import Serving, wait_until

ANSWER_S = 120.0
"""Longest wait for an answer while a process is being replaced."""


class PatientClient:
    """A client that asks again while the application is away, as the openai client does."""

    def __init__(self, served: Serving) -> None:
        self._client = served.client()

    def ask(self, method: str, path: str, **fields: Any) -> httpx.Response:
        """The first answer that is not a 5xx.  A POST whose connection broke may have been heard: none is lost."""
        answers: list[httpx.Response] = []

        def answered() -> bool:
            try:
                answer = self._client.request(method, path, **fields)
            except httpx.TransportError:
                return False
            answers.append(answer)
            return answer.status_code < 500

        wait_until(answered, ANSWER_S, f"{method} {path}")
        return answers[-1]

    def jobs(self) -> list[dict[str, Any]]:
        """Every job of the table, oldest first."""
        page = self.ask("GET", "/v1/videos", params={"limit": 100, "order": "asc"}).json()
        assert not page["has_more"]
        return page["data"]


def run_through_kills(served: Serving, requests: Sequence[dict[str, Any]], kinds: Sequence[str]) -> dict[str, float]:
    """Create the jobs, kill one process of each kind while they run, wait for all; seconds to /ready by kind."""
    client = PatientClient(served)
    for request in requests:
        assert client.ask("POST", "/v1/videos", json=request).status_code == 200
    recovered: dict[str, float] = {}
    for kind in kinds:
        unfinished = [job for job in client.jobs() if job["status"] in ("queued", "in_progress")]
        assert unfinished, f"every job had ended before {kind} could be killed: use more or longer jobs"
        wait_until(lambda: any(j["phase"] == "denoising" for j in client.jobs()), ANSWER_S, "a job to be denoised")
        killed = served.pid(kind)
        served.kill(kind)
        began = time.monotonic()
        wait_until(lambda: served.pid_or_none(kind) not in (None, killed), ANSWER_S, f"another {kind}")  # noqa: B023
        wait_until(_moves_on(client), ANSWER_S, f"jobs to go on after {kind} was killed")
        served.wait_ready(ANSWER_S)
        recovered[kind] = time.monotonic() - began
        print(f"killed {kind:14} back after {recovered[kind]:.1f} s", flush=True)
    wait_until(lambda: all(job["status"] not in ("queued", "in_progress") for job in client.jobs()), 300, "all jobs")
    return recovered


def _moves_on(client: PatientClient) -> Callable[[], bool]:
    """Whether any job has got further since now."""
    before = {job["id"]: (job["phase"], job["step"]) for job in client.jobs()}

    def moved() -> bool:
        return any(
            job["phase"] == "completed" or (job["phase"] == "denoising" and job["step"] > before[job["id"]][1])
            for job in client.jobs()
            if before[job["id"]] != (job["phase"], job["step"])
        )

    return moved


def assert_all_intact(served: Serving, frames: int) -> None:
    """Every job is completed, its file is whole, and no result was made twice."""
    client = PatientClient(served)
    jobs = client.jobs()
    assert Counter(job["status"] for job in jobs) == {"completed": len(jobs)}, [
        (job["id"], job["error"]) for job in jobs if job["status"] != "completed"
    ]
    logs = served.logs("*.log")
    for job in jobs:
        content = client.ask("GET", f"/v1/videos/{job['id']}/content").content
        assert len(content) == job["files"]["video.mp4"]
        assert len(iio.imread(io.BytesIO(content), extension=".mp4")) == frames
        for result in ("denoised", "decoded"):
            made = len(re.findall(rf"{job['id']}: {result} in", logs))
            assert made <= 1, f"{job['id']} was {result} {made} times"
