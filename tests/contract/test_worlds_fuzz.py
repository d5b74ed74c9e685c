"""Requests made from the OpenAPI schema of worlds, valid and broken: no answer is a 5xx, every one is documented."""

from __future__ import annotations

from collections import Counter
from typing import Any

import schemathesis
from schemathesis.checks import load_all_checks
from schemathesis.specs.openapi.checks import positive_data_acceptance

from app.api.application import make_app
from app.config import Http
from tests.fake_jobs import FakeJobs
from tests.fake_worlds import BODY, FakeWorlds, surface
from tests.fuzzing import fuzz_operation

CASES = 12
"""Of each kind, for each operation."""

NOT_CHECKED = [
    # A schema cannot say that one of three fields is wanted, or what an image is: what it allows may be refused.
    positive_data_acceptance,
]


def test_generated_requests_get_documented_answers():
    load_all_checks()
    worlds, jobs = FakeWorlds(), FakeJobs()
    app = make_app(jobs, [], jobs.files, Http(max_body_bytes=1 << 16), worlds=surface(worlds))
    schema = schemathesis.openapi.from_asgi("/openapi.json", app)
    for body in (BODY, BODY):
        schema["/v1/worlds"]["POST"].Case(body=body, media_type="application/json").call()
    known: dict[str, Any] = {"world_id": "world_1", "index": "0"}
    grow = schema["/v1/worlds/{world_id}/chunks"]["POST"]
    grow.Case(path_parameters=known, body={"keys": ["w"]}, media_type="application/json").call()
    statuses: Counter[int] = Counter()
    for found in schema.include(path_regex="^/v1/worlds").get_all_operations():
        operation = found.ok()
        named = {name: value for name, value in known.items() if f"{{{name}}}" in operation.path}
        paths = [None, named] if named and operation.method.upper() != "DELETE" else [None]
        fuzz_operation(operation, paths, CASES, statuses, NOT_CHECKED)
    print(sorted(statuses.items()), statuses.total())
    assert statuses.total() >= 200
    assert {200, 400, 404} <= set(statuses)
