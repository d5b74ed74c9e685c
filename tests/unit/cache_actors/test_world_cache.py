"""The cache of worlds: what is found is right, whatever was evicted, damaged, restarted or raced for."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from cache_actors.blob_store import EntryKey, SaveRefused
from cache_actors.keys import Key, path_keys, world_root
from cache_actors.world_cache import NodeGone, RootMismatch, WorldCache
from tests.world_material import MATERIAL

MIB = 1 << 20
URD = [b"u", b"u2", b"r", b"r2", b"d", b"d2"]


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def cache(tmp_path: Path, clock: Clock) -> Iterator[WorldCache]:
    cache = WorldCache(tmp_path / "worlds", 64 * MIB, ttl_s=100, clock=clock)
    yield cache
    cache.close()


def journal(key: Key) -> bytes:
    """A value that is a function of its key, 3 kB."""
    return key * 100


def ingest(cache: WorldCache, root: Key, actions: list[bytes]) -> list[Key]:
    parent, keys = root, path_keys(root, actions)
    for key, action in zip(keys, actions, strict=True):
        assert cache.put(root, parent, action, journal(key)) == key
        parent = key
    return keys


def depth(cache: WorldCache, root: Key, actions: list[bytes]) -> int:
    return len(cache.match(root, actions))


def blob(tmp_path: Path, root: Key, key: Key, name: str = "journal") -> Path:
    (path,) = (tmp_path / "worlds/entries" / root.hex()).glob(f"{key.hex()}.*/{name}")
    return path


def test_cold_full_hit_fork_and_longer_continuation(cache: WorldCache) -> None:
    root = cache.open_world(MATERIAL)
    assert depth(cache, root, URD) == 0
    keys = ingest(cache, root, URD)
    assert [found.key for found in cache.match(root, URD)] == keys
    fork = [*URD[:4], b"x", b"x2"]
    assert depth(cache, root, fork) == 4
    ingest(cache, root, fork)
    assert (depth(cache, root, fork), depth(cache, root, URD)) == (6, 6)
    assert depth(cache, root, [*URD, b"w", b"w"]) == 6
    assert [cache.read(key) for key in keys] == [journal(key) for key in keys]
    assert cache.stats()["chunks"] == 8


@pytest.mark.parametrize(
    "change",
    [
        {"image": "e" * 64},
        {"seed": 2},
        {"prompt": "a hall"},
        {"height": 480},
        {"weight_dtype": "float32"},
        {"timesteps": (999, 967, 908, 768)},
        {"window": 18, "sink": 6},
    ],
    ids=lambda change: next(iter(change)),
)
def test_other_worlds_share_nothing(cache: WorldCache, change: dict[str, object]) -> None:
    ingest(cache, cache.open_world(MATERIAL), URD)
    assert depth(cache, cache.open_world(replace(MATERIAL, **change)), URD) == 0  # type: ignore[arg-type]


def test_one_changed_chunk_ends_the_prefix(cache: WorldCache) -> None:
    root = cache.open_world(MATERIAL)
    ingest(cache, root, URD)
    for position in range(6):
        changed = [*URD[:position], b"?", *URD[position + 1 :]]
        assert depth(cache, root, changed) == position


def test_putting_again_keeps_the_first_value(cache: WorldCache) -> None:
    root = cache.open_world(MATERIAL)
    (key,) = ingest(cache, root, URD[:1])
    assert cache.put(root, root, URD[0], b"other") == key
    assert cache.read(key) == journal(key)
    with pytest.raises(KeyError, match="is not known"):
        cache.put(root, b"p" * 32, b"u", b"")


def test_everything_is_there_after_a_restart(tmp_path: Path, clock: Clock) -> None:
    cache = WorldCache(tmp_path / "worlds", 64 * MIB, ttl_s=100, clock=clock)
    root = cache.open_world(MATERIAL)
    keys = ingest(cache, root, URD)
    cache.put_frames(keys[2], b"frames")
    cache.pin(keys[5], "demo")
    cache.note_kv("gang-1", keys[0])
    cache.close()
    again = WorldCache(tmp_path / "worlds", 64 * MIB, ttl_s=100, clock=clock)
    assert again.open_world(MATERIAL) == root
    assert [(f.depth, f.has_frames, f.kv_holders) for f in again.match(root, URD)] == [
        (d, d == 3, frozenset()) for d in range(1, 7)
    ]
    assert [again.read(key) for key in keys] == [journal(key) for key in keys]
    assert again.read_frames(keys[2]) == b"frames"
    assert not again.evict(keys[5])
    again.close()


@pytest.mark.parametrize("name", ["journal", "action"])
def test_a_flipped_bit_is_found_the_chunk_put_aside_and_refilled(tmp_path: Path, cache: WorldCache, name: str) -> None:
    root = cache.open_world(MATERIAL)
    keys = ingest(cache, root, URD)
    path = blob(tmp_path, root, keys[3], name)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(NodeGone):
        cache.read(keys[3])
    assert depth(cache, root, URD) == 3
    assert cache.stats()["quarantined"] == 1
    cache.put(root, keys[2], URD[3], journal(keys[3]))
    assert depth(cache, root, URD) == 6
    assert cache.read(keys[3]) == journal(keys[3])


def test_a_chunk_under_a_wrong_key_is_put_aside(cache: WorldCache) -> None:
    """Every digest is right, but its controls do not make its key."""
    root = cache.open_world(MATERIAL)
    keys = ingest(cache, root, URD[:2])
    node = cache._trie.get(keys[1])
    assert node is not None
    node.parent = root
    with pytest.raises(NodeGone, match="do not make its key"):
        cache.read(keys[1])
    assert depth(cache, root, URD) == 1


def test_a_world_with_another_material_under_its_key_is_refused(cache: WorldCache) -> None:
    root = cache.open_world(MATERIAL)
    entry, other = EntryKey(root.hex(), "root"), replace(MATERIAL, seed=2).canonical()
    cache._store.put(entry, {"material": other}, {}, replacing=True)
    with pytest.raises(RootMismatch, match="its stored material is not that of the request"):
        cache.open_world(MATERIAL)


def test_frames_go_first_then_the_least_recently_used_leaves(tmp_path: Path, clock: Clock) -> None:
    cache = WorldCache(tmp_path / "worlds", MIB, clock=clock)
    root = cache.open_world(MATERIAL)
    old, new = [b"o1", b"o2", b"o3"], [b"n1", b"n2", b"n3"]
    size = 130_000  # 36 blocks an entry: six of them, the root and the frames leave no room for a seventh
    for actions in (old, new):
        parent = root
        for action in actions:
            parent = cache.put(root, parent, action, bytes(size))
    tip = path_keys(root, old)[0]
    cache.put_frames(tip, b"frames")
    assert cache.match(root, old)[0].has_frames  # a use: now the new path is the older one
    parent = root
    for action in (b"x1", b"x2", b"x3"):
        parent = cache.put(root, parent, action, bytes(size))
    assert not cache.match(root, old)[0].has_frames
    assert [depth(cache, root, path) for path in (old, new, [b"x1", b"x2", b"x3"])] == [3, 0, 3]
    stats = cache.stats()
    assert stats["disk_bytes"] <= MIB
    assert (stats["evicted"], stats["chunks"]) == (3, 6)
    cache.close()


def test_a_chunk_beyond_the_whole_budget_is_refused_and_drops_nothing(tmp_path: Path) -> None:
    cache = WorldCache(tmp_path / "worlds", MIB)
    root = cache.open_world(MATERIAL)
    ingest(cache, root, URD)
    with pytest.raises(SaveRefused, match="exceeds the whole budget"):
        cache.put(root, root, b"big", bytes(2 * MIB))
    assert depth(cache, root, URD) == 6
    cache.close()


def test_only_free_leaves_are_evicted_on_request(cache: WorldCache) -> None:
    root = cache.open_world(MATERIAL)
    keys = ingest(cache, root, URD)
    assert not cache.evict(keys[4])
    cache.pin(keys[5], "demo")
    assert not cache.evict(keys[5])
    cache.unpin(keys[5])
    assert cache.evict(keys[5])
    assert not cache.evict(keys[5])
    assert cache.evict(keys[4])
    with pytest.raises(NodeGone):
        cache.read(keys[4])
    with pytest.raises(NodeGone):
        cache.pin(keys[4], "demo")


def test_unused_chunks_expire_leaves_first_and_pinned_paths_stay(
    tmp_path: Path, cache: WorldCache, clock: Clock
) -> None:
    root = cache.open_world(MATERIAL)
    kept, lost = ingest(cache, root, URD[:3]), ingest(cache, root, [*URD[:1], b"x", b"y"])
    cache.pin(kept[2], "demo")
    clock.now += 50
    assert cache.find(lost[1]) is not None
    clock.now += 60
    assert cache.sweep() == 1  # y; x was used 60 s ago
    clock.now += 60
    assert cache.sweep() == 1
    assert (depth(cache, root, URD), cache.find(lost[1])) == (3, None)
    cache.unpin(kept[2])
    clock.now += 101
    assert cache.sweep() == 3
    assert cache.stats()["expired"] == 5
    assert not list(
        (tmp_path / "worlds/entries" / root.hex()).iterdir()
    )  # the root's material goes with its last chunk


def test_who_keeps_keys_and_values(cache: WorldCache) -> None:
    root = cache.open_world(MATERIAL)
    a, b = ingest(cache, root, URD[:2])

    def holders() -> list[set[str]]:
        return [set(found.kv_holders) for found in cache.match(root, URD)]

    for holder, key in (("gang-1", a), ("gang-1", b), ("gang-2", b), ("gang-2", b"unknown")):
        cache.note_kv(holder, key)
    assert holders() == [{"gang-1"}, {"gang-1", "gang-2"}]
    cache.forget_kv("gang-1", b)
    assert holders() == [{"gang-1"}, {"gang-2"}]
    cache.forget_kv("gang-1")
    assert holders() == [set(), {"gang-2"}]


def test_looking_up_waits_for_no_disk(cache: WorldCache, monkeypatch: pytest.MonkeyPatch) -> None:
    root = cache.open_world(MATERIAL)
    keys = ingest(cache, root, URD[:2])
    writing, go_on = threading.Event(), threading.Event()
    write = cache._store._write

    def slow(*arguments: object) -> Path:
        writing.set()
        assert go_on.wait(30)
        return write(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(cache._store, "_write", slow)
    writer = threading.Thread(target=cache.put, args=(root, keys[1], URD[2], b"slow"))
    writer.start()
    assert writing.wait(30)
    try:
        assert cache._lock.acquire(timeout=5)
        cache._lock.release()
        assert depth(cache, root, URD) == 2  # not found before its bytes are on the disk
        assert cache.read(keys[1]) == journal(keys[1])
    finally:
        go_on.set()
        writer.join(30)
    assert depth(cache, root, URD) == 3


def test_threads_that_put_read_and_evict_never_see_a_wrong_value(tmp_path: Path) -> None:
    """A budget of about twenty chunks for two hundred: eviction runs all the time."""
    cache = WorldCache(tmp_path / "worlds", 20 * 6 * 4096)
    root = cache.open_world(MATERIAL)
    wrong: list[Key] = []

    def work(seed: int) -> None:
        draw = random.Random(seed)
        for _ in range(40):
            actions = [bytes([draw.randrange(3)]) for _ in range(4)]
            keys = path_keys(root, actions)
            for key, found in zip(keys, cache.match(root, actions), strict=False):
                try:
                    if cache.read(found.key) != journal(key):
                        wrong.append(key)
                except NodeGone:
                    break
            parent = root
            for key, action in zip(keys, actions, strict=True):
                try:
                    cache.put(root, parent, action, journal(key))
                except (KeyError, SaveRefused):
                    break  # its parent was evicted in between, or there is no room just now
                parent = key
            if draw.random() < 0.2:
                cache.evict(keys[-1])

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert wrong == []
    stats = cache.stats()
    assert stats["evicted"] > 10
    assert stats["disk_bytes"] <= stats["budget_bytes"]
    assert stats["quarantined"] == 0
    cache.close()


def test_roots_are_those_of_the_keys(cache: WorldCache) -> None:
    assert cache.open_world(MATERIAL) == world_root(MATERIAL) == cache.open_world(MATERIAL)
