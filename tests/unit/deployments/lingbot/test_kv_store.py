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
    assert store.room(b"c", (26,), torch.float32) is None
    assert store.room(b"a", (10,), torch.float32) is None  # held already
    room = store.room(b"c", (2, 10), torch.bfloat16)
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


def test_room_is_made_before_memory_is_taken() -> None:
    store = KVStore(100)
    store.put(b"a", blob(1))
    store.put(b"b", blob(2))
    assert store.room(b"c", (10,), torch.float32) is not None
    assert (store.has(b"a"), store.has(b"b"), store.nbytes) == (False, True, 40)


def test_without_a_gpu_nothing_is_reserved() -> None:
    assert KVStore(100).reserve((10,), torch.float32) == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_reserved_memory_is_what_blobs_get() -> None:
    store = KVStore(3 << 20, pinned=True)
    assert store.reserve((1 << 18,), torch.float32) == 3
    places = set()
    for number in range(8):
        room = store.room(b"%d" % number, (1 << 18,), torch.float32)
        assert room is not None
        assert room.is_pinned()
        places.add(room.data_ptr())
        store.put(b"%d" % number, room)
        del room
    assert len(places) == 3
