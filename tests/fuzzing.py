"""Requests that schemathesis draws for one operation of an OpenAPI schema."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import Case, GenerationMode


def fuzz_operation(
    operation: Any,
    paths: Sequence[Mapping[str, Any] | None],
    cases: int,
    statuses: Counter[int],
    excluded_checks: Sequence[Any],
) -> None:
    """Valid and broken requests, up to `cases` of each kind and each of `paths`; the same ones every time.

    No answer may be a 5xx, and each must be as documented but for the excluded checks.  paths: path parameters, None
    where they are drawn too.  statuses: counts the answers.
    """
    for mode in GenerationMode:
        for path_parameters in paths:

            @settings(
                max_examples=cases,
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
                case.validate_response(answer, excluded_checks=list(excluded_checks))

            with contextlib.suppress(Unsatisfiable):  # an operation without input has nothing to break
                check()
