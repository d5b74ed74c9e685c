"""Requests made from the OpenAPI schema, valid and broken: no answer is a 5xx and every answer is one it documents."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator

import pytest
import schemathesis
from schemathesis.checks import load_all_checks
from schemathesis.specs.openapi.checks import positive_data_acceptance

from app.api.application import make_app
from app.config import Http
from tests.fake_jobs import FakeJobs, card
from tests.fuzzing import fuzz_operation

CASES = 24
"""Of each kind, for each operation with input, valid and broken: well above the 200 in all that are promised."""

NOT_CHECKED = [
    # A schema cannot say 4k + 1, multiples of 16, the model's own limits, or seconds against num_frames: what is valid
    # by schema may be refused.  tests/unit/app/api/test_video_request.py has what must be accepted.
    positive_data_acceptance,
]


@pytest.fixture
def jobs() -> Iterator[FakeJobs]:
    """One completed job, `video_1`, and a driver in which every job ends soon."""
    jobs = FakeJobs(pace_s=0.0001)
    yield jobs
    assert jobs.created > 1, "no generated request was good enough to become a job"


def test_generated_requests_get_documented_answers(jobs: FakeJobs):
    load_all_checks()
    app = make_app(jobs, [card()], jobs.files, Http(max_body_bytes=1 << 16))
    schema = schemathesis.openapi.from_asgi("/openapi.json", app)
    schema["/v1/videos"]["POST"].Case(body={"prompt": "a"}, media_type="application/json").call()
    asyncio.run(jobs.wait("video_1"))
    statuses: Counter[int] = Counter()
    for found in schema.get_all_operations():
        operation = found.ok()
        ids = [None, {"video_id": "video_1"}] if "{video_id}" in operation.path else [None]
        fuzz_operation(operation, ids, CASES, statuses, NOT_CHECKED)
    print(sorted(statuses.items()), statuses.total())
    assert statuses.total() >= 200
    assert {200, 400, 404} <= set(statuses)
    good = schema["/v1/videos"]["POST"].Case(body={"prompt": "after all that"}, media_type="application/json").call()
    assert good.status_code == 200
