"""Two hundred and more bad requests against the running application: no 5xx, and good ones go on being served."""

from __future__ import annotations

import time
from collections import Counter

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import Case, GenerationMode
from schemathesis.specs.openapi import checks  # noqa: F401 (registers the checks)

from tests.e2e.frames import create, finish
from tests.serving import Serving

pytestmark = pytest.mark.timeout(600)  # the first test also waits for the application to start

CASES = 30
"""Of each operation that takes a body or parameters."""
BUDGET_S = 60.0
"""For all of them; the rest of an operation's cases is left out once it is spent."""

# What a schema cannot break: wrong by hand, one of each kind.
BROKEN = {
    "bad JSON": {"content": b'{"prompt": ', "headers": {"content-type": "application/json"}},
    "NaN": {"content": b'{"prompt": "a", "guidance_scale": NaN}', "headers": {"content-type": "application/json"}},
    "not UTF-8": {"content": b'{"prompt": "\xff"}', "headers": {"content-type": "application/json"}},
    "no body": {},
    "an array": {"json": []},
    "wrong type": {"content": b"prompt=a", "headers": {"content-type": "application/x-www-form-urlencoded"}},
    "text": {"content": b"a", "headers": {"content-type": "text/plain"}},
    "multipart without boundary": {"content": b"a", "headers": {"content-type": "multipart/form-data"}},
    "torn multipart": {
        "content": b'--x\r\nContent-Disposition: form-data; name="prompt"\r\n\r\na',
        "headers": {"content-type": "multipart/form-data; boundary=x"},
    },
    "too large": {
        "content": b'{"prompt": "' + b"a" * (2 << 20) + b'"}',
        "headers": {"content-type": "application/json"},
    },
    "deep": {"content": b"[" * 100_000, "headers": {"content-type": "application/json"}},
    "unknown field": {"json": {"model": "tiny", "prompt": "a", "colour": "red"}},
    "size": {"json": {"model": "tiny", "prompt": "a", "size": "65x48"}},
    "frames": {"json": {"model": "tiny", "prompt": "a", "num_frames": 8}},
    "steps": {"json": {"model": "tiny", "prompt": "a", "num_inference_steps": 10**30}},
    "surrogate": {
        "content": b'{"model": "tiny", "prompt": "\\ud800"}',
        "headers": {"content-type": "application/json"},
    },
    "NUL": {"json": {"model": "tiny", "prompt": "a\0"}},
    "model": {"json": {"model": "../etc", "prompt": "a"}},
}


@pytest.mark.parametrize("path", ["/v1/videos", "/v1/videos/sync"])
def test_a_good_request_after_each_kind_of_bad_one(http: httpx.Client, path: str):
    for kind, fields in BROKEN.items():
        answer = http.post(path, **fields)  # type: ignore[arg-type]
        assert 400 <= answer.status_code < 500, (kind, answer.status_code, answer.text)
        assert answer.json()["error"]["message"], kind
        job = finish(http, create(http, num_inference_steps=1, num_frames=1))
        assert job["status"] == "completed", (kind, job["error"])


def test_generated_requests(served: Serving, http: httpx.Client):
    schema = schemathesis.openapi.from_url(f"{served.base_url}/openapi.json")
    statuses: Counter[int] = Counter()
    broken: list[str] = []
    end = time.monotonic() + BUDGET_S
    done = create(http, num_inference_steps=1)
    finish(http, done)
    for found in schema.get_all_operations():
        operation = found.ok()
        if operation.path in ("/health", "/ready", "/v1/videos/sync", "/v1/videos/{video_id}/events"):
            continue  # no input, or the same input with a stream as answer: see above and test_videos
        for mode in (GenerationMode.NEGATIVE, GenerationMode.POSITIVE):

            @settings(
                max_examples=CASES,
                deadline=None,
                database=None,
                derandomize=True,
                phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            )
            @given(case=operation.as_strategy(mode))
            def check(case: Case) -> None:
                if time.monotonic() > end and statuses.total() >= 200:
                    return
                answer = case.call(timeout=30)
                statuses[answer.status_code] += 1
                if answer.status_code >= 500:
                    broken.append(f"{case.as_curl_command()}: {answer.status_code} {answer.text[:300]}")

            try:
                check()
            except Exception as error:
                if type(error).__name__ != "Unsatisfiable":
                    raise
    print(sorted(statuses.items()), statuses.total())
    assert not broken, "\n".join(broken[:5])
    assert sum(number for status, number in statuses.items() if 400 <= status < 500) >= 200
    assert http.get("/health").status_code == 200
    assert http.get("/ready").status_code == 200
    cancel_all(http)
    assert finish(http, create(http))["status"] == "completed"


def cancel_all(http: httpx.Client) -> None:
    """Generated requests that were good may have asked for a thousand steps."""
    for job in http.get("/v1/videos", params={"limit": 100}).json()["data"]:
        if job["status"] in ("queued", "in_progress"):
            http.post(f"/v1/videos/{job['id']}/cancel")
