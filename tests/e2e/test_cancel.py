"""Cancel in every phase: the work stops, its files go, and the next request gets the bits it always got."""

from __future__ import annotations

import time
from typing import Any

import httpx
import numpy as np
import pytest

from tests.e2e.frames import create, finish, make
from tests.serving import Serving, wait_until

pytestmark = pytest.mark.timeout(600)  # the first test also waits for the application to start

LONG: dict[str, Any] = {"num_inference_steps": 1000}
LONG_DECODE: dict[str, Any] = {"num_inference_steps": 1, "num_frames": 121}


def until_phase(http: httpx.Client, job: str, phase: str, step: int = 0) -> None:
    def there() -> bool:
        state = http.get(f"/v1/videos/{job}").json()
        assert state["status"] in ("queued", "in_progress"), state
        return bool(state["phase"] == phase and state["step"] >= step)

    wait_until(there, 60, f"{job} to be {phase}")


def files_of(served: Serving, job: str) -> list[str]:
    folder = served.folder / "worldstage-data" / "results" / job
    return [path.name for path in folder.iterdir()] if folder.is_dir() else []


@pytest.mark.parametrize("name", ["tiny", "wide"])
def test_denoising_stops_within_a_step(served: Serving, http: httpx.Client, name: str):
    before = make(http, model=name, seed=1)
    job = create(http, model=name, **LONG)
    until_phase(http, job, "denoising", 15)  # past the first saved solver state
    began = time.monotonic()
    cancelled = http.post(f"/v1/videos/{job}/cancel").json()
    assert cancelled["status"] == "cancelled"
    assert 15 <= cancelled["step"] < 1000
    assert np.array_equal(make(http, model=name, seed=1), before)
    print(f"the next request was done {time.monotonic() - began:.2f} s after the cancel")
    time.sleep(1.0)
    assert files_of(served, job) == []
    assert http.get(f"/v1/videos/{job}").json()["status"] == "cancelled"


def test_queued_jobs_go_at_once(served: Serving, http: httpx.Client):
    running = [create(http, **LONG) for _ in range(2)]
    until_phase(http, running[1], "denoising")
    queued = create(http)
    assert http.get(f"/v1/videos/{queued}").json()["position"] == 1
    cancelled = http.post(f"/v1/videos/{queued}/cancel").json()
    assert (cancelled["status"], cancelled["attempt"]) == ("cancelled", 0)
    for job in running:
        assert http.post(f"/v1/videos/{job}/cancel").json()["status"] == "cancelled"
    assert files_of(served, queued) == []


def test_encoding_is_cancelled(served: Serving, http: httpx.Client):
    """The phase is short: of many jobs cancelled right after their creation, some are caught in it."""
    before = make(http, seed=2)
    phases = set()
    for _ in range(10):
        job = create(http)
        cancelled = http.post(f"/v1/videos/{job}/cancel")
        if cancelled.status_code == 200:
            phases.add((cancelled.json()["attempt"], cancelled.json()["step"]))
    assert phases  # at least one was not completed before its cancel arrived
    assert np.array_equal(make(http, seed=2), before)


def test_decoding_stops(served: Serving, http: httpx.Client):
    before = make(http, seed=3)
    whole = finish(http, create(http, **LONG_DECODE))["timings"]["decoding"]
    job = create(http, **LONG_DECODE)
    until_phase(http, job, "decoding")
    assert http.post(f"/v1/videos/{job}/cancel").json()["status"] == "cancelled"
    began = time.monotonic()
    assert np.array_equal(make(http, seed=3), before)  # by the same decoder, which has one thread
    after = time.monotonic() - began
    print(f"a whole decode takes {whole:.2f} s, the next request was done {after:.2f} s after the cancel")
    assert after < whole
    assert f"{job}: decoded in" not in served.logs("*tiny-decoder*")  # it never got to the end
    assert files_of(served, job) == []


def test_a_closed_sync_connection_cancels(served: Serving, http: httpx.Client):
    before = make(http, seed=4)
    known = {job["id"] for job in http.get("/v1/videos", params={"limit": 100}).json()["data"]}
    with pytest.raises(httpx.ReadTimeout), httpx.Client(base_url=served.base_url, timeout=2) as impatient:
        impatient.post("/v1/videos/sync", json={"model": "tiny", "prompt": "a red circle", **LONG})
    (job,) = (
        job["id"] for job in http.get("/v1/videos", params={"limit": 100}).json()["data"] if job["id"] not in known
    )
    wait_until(lambda: http.get(f"/v1/videos/{job}").json()["status"] == "cancelled", 10, f"{job} to be cancelled")
    assert np.array_equal(make(http, seed=4), before)


def test_what_is_over_cannot_be_cancelled(http: httpx.Client):
    job = create(http)
    finish(http, job)
    answer = http.post(f"/v1/videos/{job}/cancel")
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "wrong_state")
    assert http.get(f"/v1/videos/{job}/content").status_code == 200
