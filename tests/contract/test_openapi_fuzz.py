"""Requests made from the OpenAPI schema, valid and broken: no answer is a 5xx and every answer is one it documents."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Iterator

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import Case, GenerationMode
from schemathesis.checks import load_all_checks
from schemathesis.specs.openapi.checks import positive_data_acceptance

from app.api.application import make_app
from app.config import Http
from tests.fake_jobs import FakeJobs, card

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
        for mode in GenerationMode:
            for path_parameters in ids:

                @settings(
                    max_examples=CASES,
                    deadline=None,
                    database=None,
                    derandomize=True,
                    phases=[Phase.generate],
                    suppress_health_check=list(HealthCheck),
                )
                @given(case=operation.as_strategy(mode, path_parameters=path_parameters))
                def check(case: Case) -> None:
                    answer = case.call()
                    statuses[answer.status_code] += 1
                    assert answer.status_code < 500
                    case.validate_response(answer, excluded_checks=NOT_CHECKED)

                with contextlib.suppress(Unsatisfiable):  # an operation without input has nothing to break
                    check()
    print(sorted(statuses.items()), statuses.total())
    assert statuses.total() >= 200
    assert {200, 400, 404} <= set(statuses)
    good = schema["/v1/videos"]["POST"].Case(body={"prompt": "after all that"}, media_type="application/json").call()
    assert good.status_code == 200
