"""A budget in bytes, least recently used first."""

from __future__ import annotations

import pytest
import torch

from deployments.lingbot.kv_store import KVStore


def blob(value: float, elements: int = 10) -> torch.Tensor:
    return torch.full((elements,), value, dtype=torch.float32)


def test_the_least_recently_used_goes_first() -> None:
    store = KVStore(100)
    store.put(b"a", blob(1))
    store.put(b"b", blob(2))
    assert store.get(b"a") is not None
    store.put(b"c", blob(3))
    assert [store.has(key) for key in (b"a", b"b", b"c")] == [True, False, True]
    assert store.nbytes == 80
    assert store.get(b"b") is None


def test_a_blob_beyond_the_budget_is_not_kept_and_drops_nothing() -> None:
    store = KVStore(100)
    store.put(b"a", blob(1))
    store.put(b"b", blob(2, 26))
    assert (store.has(b"a"), store.has(b"b")) == (True, False)
    assert store.room(b"c", (26,), torch.float32, pinned=False) is None
    assert store.room(b"a", (10,), torch.float32, pinned=False) is None  # held already
    room = store.room(b"c", (2, 10), torch.bfloat16, pinned=False)
    assert room is not None
    assert (room.shape, room.dtype) == ((2, 10), torch.bfloat16)


def test_the_first_blob_stays_and_dropping_frees() -> None:
    store = KVStore(100)
    store.put(b"a", blob(1))
    store.put(b"a", blob(2))
    kept = store.get(b"a")
    assert kept is not None
    assert kept[0] == 1
    store.drop(b"a")
    store.drop(b"a")
    assert store.nbytes == 0


def test_no_budget_keeps_nothing() -> None:
    store = KVStore(0)
    store.put(b"a", blob(1))
    assert not store.has(b"a")
    with pytest.raises(ValueError, match="budget_bytes: got -1"):
        KVStore(-1)
