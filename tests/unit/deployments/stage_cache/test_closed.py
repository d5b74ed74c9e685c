"""Records are closed, frozen, finite, and have one digest."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
from pydantic import ValidationError

from deployments.stage_cache.closed import Closed, checked_branch, digest_of


class Example(Closed):
    a: float
    b: tuple[int, ...] = ()


@pytest.mark.parametrize("fields", [{"a": 1, "c": 2}, {"a": float("nan")}, {"a": float("inf")}, {}])
def test_wrong_fields_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Example(**fields)


def test_values_do_not_change() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        Example(a=1.0).a = 2.0  # type: ignore[misc]


def test_digest_is_sha256_of_canonical_json() -> None:
    assert Example(a=0.1, b=(1,)).digest == hashlib.sha256(b'{"a":0.1,"b":[1]}').hexdigest()
    assert digest_of({"b": 1, "a": 2}) == digest_of({"a": 2, "b": 1})
    assert digest_of([0.1]) != digest_of([0.1 + 2**-55])
    with pytest.raises(ValueError, match="JSON compliant"):
        digest_of([float("nan")])


@pytest.mark.parametrize("name", ["uncond", "", None, 0])
def test_a_branch_is_named(name: object) -> None:
    """Check 21: no guess, no default."""
    with pytest.raises(ValueError, match=r"expected one of \['positive', 'negative'\]"):
        checked_branch(name)
    assert checked_branch("negative") == "negative"
