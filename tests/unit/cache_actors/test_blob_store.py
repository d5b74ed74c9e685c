"""Entries are whole or absent, inside the budget, through corruption, kills and concurrent readers."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from cache_actors.blob_store import BlobCorrupt, BlobMissing, BlobStore, EntryKey, Pin, SaveRefused, StoreError

KIB = 1024
SMALL = 16 * KIB
"""An entry of `fill(4)` takes 4 KiB of blob, manifest, folder and pin: four blocks."""


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def key(name: str, partition: str = "p") -> EntryKey:
    return EntryKey(partition, name)


def fill(kib: int, letter: bytes = b"x") -> dict[str, bytes]:
    return {"data.bin": letter * (kib * KIB)}


def opened(root: Path, budget: int = 1 << 20, **options) -> BlobStore:
    store = BlobStore(root, budget, **options)
    list(store.load())
    return store


def on_disk(root: Path) -> int:
    """As `du`: every file and folder below the three, in blocks of 4 KiB."""
    total = 0
    for part in ("entries", "incoming", "quarantine"):
        for folder, _, files in os.walk(root / part):
            if folder != str(root / part) and Path(folder).parent != root / "entries":
                total += 4096
            for name in files:
                total += -(-os.stat(f"{folder}/{name}").st_size // 4096) * 4096
    return total


def test_a_saved_entry_is_read_back_and_survives_a_restart(tmp_path: Path) -> None:
    store = opened(tmp_path)
    store.put(key("a"), {"one": b"1", "two": b"22"}, {"k": [1, None, "x"]})
    assert store.read(key("a")) == {"one": b"1", "two": b"22"}
    assert store.read(key("a"), "two") == {"two": b"22"}
    used = store.disk_bytes
    store.close()
    again = BlobStore(tmp_path, 1 << 20)
    (entry,) = again.load()
    assert entry.key == key("a")
    assert entry.facts == {"k": [1, None, "x"]}
    assert entry.blobs == {"one": 1, "two": 2}
    assert again.read(key("a"), "one") == {"one": b"1"}
    assert again.disk_bytes == used


def test_saving_a_ready_key_again_changes_nothing_unless_replacing(tmp_path: Path) -> None:
    gone = []
    store = opened(tmp_path, gone=lambda entry, reason: gone.append((entry.key.name, reason)))
    store.put(key("a"), fill(4, b"1"), {})
    store.pin(key("a"), Pin("me", time.time() + 100))
    assert store.put(key("a"), fill(4, b"2"), {}) is None
    assert store.read(key("a"))["data.bin"][:1] == b"1"
    used = store.disk_bytes
    new = store.put(key("a"), fill(4, b"3"), {}, replacing=True)
    assert new is not None
    assert new.pin is not None
    assert store.read(key("a"))["data.bin"][:1] == b"3"
    assert gone == [("a", "replaced")]
    assert store.disk_bytes == used
    store.close()
    (entry,) = BlobStore(tmp_path, 1 << 20).load()
    assert entry.pin == new.pin


def test_least_recently_used_goes_first_also_after_a_restart(tmp_path: Path) -> None:
    clock = Clock()
    store = opened(tmp_path, 3 * SMALL, clock=clock)
    for name in "abc":
        clock.now += 1
        store.put(key(name), fill(4), {})
        os.utime(store.get(key(name)).folder, (clock.now, clock.now))
    clock.now += 1
    store.read(key("a"))
    store.close()
    store = opened(tmp_path, 3 * SMALL, clock=clock)
    store.put(key("d"), fill(4), {})
    assert [entry.key.name for entry in store.entries()] == ["c", "a", "d"]


def test_disk_never_exceeds_the_budget_while_threads_save(tmp_path: Path) -> None:
    budget = 10 * SMALL
    store = opened(tmp_path, budget)
    stop, seen = threading.Event(), []

    def watch() -> None:
        while not stop.is_set():
            try:
                seen.append(on_disk(tmp_path))
            except FileNotFoundError:
                continue  # an entry went while it was counted

    def save(thread: int) -> None:
        for i in range(60):
            store.put(key(f"{thread}-{i}"), fill(1 + i % 9), {})

    watcher = threading.Thread(target=watch)
    savers = [threading.Thread(target=save, args=(i,)) for i in range(3)]
    for thread in (watcher, *savers):
        thread.start()
    for thread in savers:
        thread.join()
    stop.set()
    watcher.join()
    assert len(seen) > 10
    assert max(seen) <= budget
    assert on_disk(tmp_path) <= store.disk_bytes <= budget
    assert len(store.entries()) >= 4


def test_pins_hold_and_a_budget_full_of_pins_refuses(tmp_path: Path) -> None:
    clock = Clock()
    store = opened(tmp_path, 2 * SMALL, clock=clock)
    store.put(key("a"), fill(4), {})
    store.put(key("b"), fill(4), {})
    for name in "ab":
        store.pin(key(name), Pin("me", 2000.0))
    with pytest.raises(SaveRefused) as refused:
        store.put(key("c"), fill(4), {})
    assert refused.value.reason == "budget_pinned"
    clock.now = 2001.0
    store.put(key("c"), fill(4), {})
    assert [entry.key.name for entry in store.entries()] == ["b", "c"]
    store.pin(key("b"), None)
    with pytest.raises(SaveRefused, match="exceeds the whole budget"):
        store.put(key("d"), fill(64), {})


def test_an_entry_being_read_is_not_evicted(tmp_path: Path) -> None:
    store = opened(tmp_path, 2 * SMALL)
    store.put(key("a"), fill(4), {})
    store.put(key("b"), fill(4), {})
    with store._lease(key("a"), use=True):  # the window between look-up and load, held open
        store.put(key("c"), fill(4), {})
        store.put(key("d"), fill(4), {})
        assert {entry.key.name for entry in store.entries()} == {"a", "d"}


def test_the_number_of_entries_is_bounded_too(tmp_path: Path) -> None:
    store = opened(tmp_path, max_entries=2)
    for name in "abc":
        store.put(key(name), fill(4), {})
    assert [entry.key.name for entry in store.entries()] == ["b", "c"]
    store.read(key("b"), use=False)
    store.put(key("d"), fill(4), {})
    assert [entry.key.name for entry in store.entries()] == ["c", "d"]
    store.condemn(key("c"))
    assert [entry.key.name for entry in store.entries()] == ["d"]
    assert len(list((tmp_path / "quarantine").iterdir())) == 1


def test_time_to_live(tmp_path: Path) -> None:
    clock, gone = Clock(), []
    store = opened(tmp_path, clock=clock, gone=lambda entry, reason: gone.append(reason))
    store.put(key("a"), fill(4), {}, expires=1010.0)
    store.put(key("b"), fill(4), {})
    clock.now = 1010.0
    with pytest.raises(BlobMissing, match="expired"):
        store.read(key("a"))
    assert store.sweep() == 1
    assert gone == ["expired"]
    assert [entry.key.name for entry in store.entries()] == ["b"]


@pytest.mark.parametrize("fault", ["flip", "truncate", "delete", "manifest"])
def test_a_damaged_entry_is_quarantined_once(tmp_path: Path, fault: str) -> None:
    gone = []
    store = opened(tmp_path, gone=lambda entry, reason: gone.append(reason))
    entry = store.put(key("a"), fill(4), {})
    used = store.disk_bytes
    victim = entry.folder / ("manifest.json" if fault == "manifest" else "data.bin")
    data = bytearray(victim.read_bytes())
    match fault:
        case "flip":
            data[100] ^= 1
            victim.write_bytes(data)
        case "truncate" | "manifest":
            victim.write_bytes(data[:50])
        case "delete":
            victim.unlink()
    with pytest.raises(BlobCorrupt):
        store.read(key("a"))
    with pytest.raises(BlobMissing):
        store.read(key("a"))
    assert gone == ["quarantined"]
    assert len(list((tmp_path / "quarantine").iterdir())) == 1
    assert on_disk(tmp_path) <= store.disk_bytes <= used


def test_quarantine_counts_and_is_the_last_to_make_room(tmp_path: Path) -> None:
    store = opened(tmp_path, 2 * SMALL)
    entry = store.put(key("a"), fill(4), {})
    (entry.folder / "data.bin").write_bytes(b"y" * 4 * KIB)
    with pytest.raises(BlobCorrupt):
        store.read(key("a"))
    store.put(key("b"), fill(4), {})
    store.pin(key("b"), Pin("me", time.time() + 100))
    store.put(key("c"), fill(4), {})
    assert list((tmp_path / "quarantine").iterdir()) == []
    assert store.disk_bytes == 2 * SMALL


def test_a_start_drops_leftovers_and_quarantines_what_it_cannot_read(tmp_path: Path) -> None:
    store = opened(tmp_path)
    _, bad, torn = (store.put(key(name), fill(4), {}) for name in ("good", "bad", "torn"))
    store.close()
    manifest = json.loads((bad.folder / "manifest.json").read_text())
    manifest["facts"] = {"tenant": "another"}
    (bad.folder / "manifest.json").write_text(json.dumps(manifest))
    (torn.folder / "data.bin").write_bytes(b"short")
    (tmp_path / "incoming" / "dead").mkdir()
    (tmp_path / "incoming" / "dead" / "data.bin").write_bytes(b"x")
    (tmp_path / "incoming" / "pin").write_bytes(b"x")
    store = BlobStore(tmp_path, 1 << 20)
    assert [entry.key.name for entry in store.load()] == ["good"]
    assert list((tmp_path / "incoming").iterdir()) == []
    assert len(list((tmp_path / "quarantine").iterdir())) == 2
    assert on_disk(tmp_path) <= store.disk_bytes


def test_a_smaller_budget_evicts_at_the_start(tmp_path: Path) -> None:
    store = opened(tmp_path)
    for name in "abcd":
        store.put(key(name), fill(4), {})
    store.close()
    assert len(opened(tmp_path, 2 * SMALL).entries()) == 2
    assert on_disk(tmp_path) <= 2 * SMALL


def test_a_folder_has_one_owner(tmp_path: Path) -> None:
    opened(tmp_path)
    with pytest.raises(StoreError, match="belongs to another running cache"):
        BlobStore(tmp_path, 1 << 20)


def test_names_cannot_leave_the_folder(tmp_path: Path) -> None:
    store = opened(tmp_path)
    for bad in (EntryKey("..", "a"), EntryKey("p", "a/b"), EntryKey("p", "")):
        with pytest.raises(ValueError, match="key"):
            store.put(bad, {}, {})
    for blob in ("manifest.json", "../x", "pin.json"):
        with pytest.raises(ValueError, match="blob"):
            store.put(key("a"), {blob: b""}, {})


def _save_for_ever(root: str, committed: str) -> None:
    store = BlobStore(Path(root), 1 << 24)
    list(store.load())
    with open(committed, "ab", buffering=0) as log:
        for i in range(100_000):
            store.put(key(f"{os.getpid()}-{i}"), {"a": str(i).encode() * 3000, "b": b"b"}, {"i": i})
            log.write(f"{os.getpid()}-{i}\n".encode())


def test_kill_9_loses_no_committed_entry_and_serves_no_torn_one(tmp_path: Path) -> None:
    root, log = tmp_path / "store", tmp_path / "committed"
    context = multiprocessing.get_context("fork")
    for wait in (0.05, 0.11, 0.17):
        process = context.Process(target=_save_for_ever, args=(str(root), str(log)))
        process.start()
        deadline, before = time.monotonic() + 20, log.stat().st_size if log.exists() else 0
        while (not log.exists() or log.stat().st_size == before) and time.monotonic() < deadline:
            time.sleep(0.005)
        time.sleep(wait)
        os.kill(process.pid, signal.SIGKILL)
        process.join()
    committed = log.read_text().split()
    assert len(committed) > 3
    store = opened(root, 1 << 24)
    assert set(committed) <= {entry.key.name for entry in store.entries()}
    for entry in store.entries():
        assert store.read(entry.key) == {"a": str(entry.facts["i"]).encode() * 3000, "b": b"b"}
    assert list((root / "quarantine").iterdir()) == []


@pytest.mark.slow
@pytest.mark.timeout(1800)  # each save waits for the disk five times
def test_ten_thousand_saves_stay_inside_the_budget(tmp_path: Path) -> None:
    budget = 100 * SMALL
    store = opened(tmp_path, budget)
    for i in range(10_000):
        store.put(key(str(i)), fill(1 + i % 13), {})
        if i % 50 == 0:
            assert on_disk(tmp_path) <= store.disk_bytes <= budget
    assert len(store.entries()) >= 60
