"""Requests to the latent cache's endpoints made from their schema, valid and broken: no answer is a 5xx."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import schemathesis
from schemathesis.checks import load_all_checks
from schemathesis.specs.openapi.checks import positive_data_acceptance

from app.api.application import make_app
from app.config import Http
from cache_actors.latent_entries import EntryFilter
from tests.fake_jobs import FakeJobs, card
from tests.fuzzing import fuzz_operation
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
        paths = [None, {"entry_id": name}] if "{entry_id}" in operation.path else [None]
        # A name that fits the pattern need not be stored.
        fuzz_operation(operation, paths, CASES, statuses, [positive_data_acceptance])
    print(sorted(statuses.items()), statuses.total())
    assert {200, 400, 404} <= set(statuses)
    cache.close(1)
