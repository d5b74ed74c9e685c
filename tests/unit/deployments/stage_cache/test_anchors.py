"""Who may read a residual, and what it costs."""

from __future__ import annotations

import pytest
import torch

from deployments.stage_cache.anchors import AnchorError, AnchorStore


def tensor(value: float) -> torch.Tensor:
    """16 bytes."""
    return torch.full((1, 2, 4), value, dtype=torch.bfloat16)


def test_keeps_the_newest_of_each_branch() -> None:
    store = AnchorStore(1000)
    assert store.reserve(7, 64) is None
    for step in range(4):
        store.keep(7, "positive", step, tensor(step), 2)
    store.keep(7, "negative", 3, tensor(30), 2)
    assert [t[0, 0, 0].item() for t in store.get(7, "positive", (3, 2))] == [3, 2]
    assert [t[0, 0, 0].item() for t in store.get(7, "negative", (3,))] == [30]
    with pytest.raises(AnchorError, match=r"no residual of steps \[1\], held are \[2, 3\]"):
        store.get(7, "positive", (3, 1))
    with pytest.raises(AnchorError, match=r"no residual of steps \[2\]"):
        store.get(7, "negative", (3, 2))


def test_bytes_are_counted_and_bounded_at_admission() -> None:
    """Memory budget: the request that would exceed it is told why; the others keep theirs."""
    store = AnchorStore(100)
    assert store.reserve(1, 64) is None
    store.keep(1, "positive", 0, tensor(1), 2)
    assert (store.reserved_bytes, store.held_bytes) == (64, 16)
    refused = store.reserve(2, 64)
    assert refused is not None
    assert refused.code == "memory"
    assert "needs 64 bytes on this rank, 36 of 100 are free" in refused.message
    assert store.reserve(3, 36) is None
    store.drop(1)
    assert (store.reserved_bytes, store.held_bytes) == (36, 0)
    assert store.reserve(2, 64) is None


def test_a_reservation_is_never_exceeded() -> None:
    store = AnchorStore(100)
    store.reserve(1, 16)
    store.keep(1, "positive", 0, tensor(1), 1)
    store.keep(1, "positive", 1, tensor(1), 1)  # replaces: still 16
    with pytest.raises(AnchorError, match="would hold 32 bytes, reserved are 16"):
        store.keep(1, "negative", 1, tensor(1), 1)


def test_unknown_and_repeated_requests_are_errors() -> None:
    """Checks 9, 26, 30: after a drop or in a new process nothing of a request is left, and saying so is an error."""
    store = AnchorStore(100)
    store.reserve(1, 16)
    store.keep(1, "positive", 0, tensor(1), 1)
    with pytest.raises(AnchorError, match="already admitted"):
        store.reserve(1, 16)
    store.drop(1)
    with pytest.raises(AnchorError, match="not admitted"):
        store.get(1, "positive", (0,))
    store.reserve(1, 16)
    with pytest.raises(AnchorError, match=r"no residual of steps \[0\], held are \[\]"):
        store.get(1, "positive", (0,))
    store.drop(99)  # a native request: no error


def test_steps_only_go_forward() -> None:
    store = AnchorStore(100)
    store.reserve(1, 64)
    store.keep(1, "positive", 5, tensor(1), 2)
    with pytest.raises(AnchorError, match="step 5 after step 5"):
        store.keep(1, "positive", 5, tensor(1), 2)


def test_a_negative_budget_is_refused() -> None:
    with pytest.raises(ValueError, match="budget_bytes"):
        AnchorStore(-1)
