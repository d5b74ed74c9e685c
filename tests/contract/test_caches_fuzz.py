"""Requests to the latent cache's endpoints made from their schema, valid and broken: no answer is a 5xx."""

from __future__ import annotations

import contextlib
from collections import Counter
from pathlib import Path

import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import Case, GenerationMode
from schemathesis.checks import load_all_checks
from schemathesis.specs.openapi.checks import positive_data_acceptance

from app.api.application import make_app
from app.config import Http
from cache_actors.latent_entries import EntryFilter
from tests.fake_jobs import FakeJobs, card
from tests.latents import identity, opened, save
from tests.near_cache import Near

CASES = 12
"""Of each kind, for each operation."""


def test_generated_requests_get_documented_answers(tmp_path: Path) -> None:
    load_all_checks()
    jobs, cache = FakeJobs(), opened(tmp_path, {})
    app = make_app(jobs, [card()], jobs.files, Http(), latent_cache=Near(cache))
    schema = schemathesis.openapi.from_asgi("/openapi.json", app)
    statuses: Counter[int] = Counter()
    for found in schema.get_all_operations():
        operation = found.ok()
        if not operation.path.startswith("/v1/caches"):
            continue
        save(cache, identity())
        name = (cache.entries(EntryFilter(), 1) or [])[0]["id"]
        for mode in GenerationMode:
            for path in [None, {"entry_id": name}] if "{entry_id}" in operation.path else [None]:

                @settings(
                    max_examples=CASES,
                    deadline=None,
                    database=None,
                    derandomize=True,
                    phases=[Phase.generate],
                    suppress_health_check=list(HealthCheck),
                )
                @given(case=operation.as_strategy(mode, path_parameters=path))
                def check(case: Case) -> None:
                    answer = case.call()
                    statuses[answer.status_code] += 1
                    assert answer.status_code < 500
                    # A name that fits the pattern need not be stored.
                    case.validate_response(answer, excluded_checks=[positive_data_acceptance])

                with contextlib.suppress(Unsatisfiable):
                    check()
    print(sorted(statuses.items()), statuses.total())
    assert {200, 400, 404} <= set(statuses)
    cache.close(1)
