"""Entries on disk: blobs with a manifest, whole or absent, inside a byte budget.

Invariants
    An entry is published by one rename of its folder, so every reader and every restart sees all of it or nothing.
    The bytes on disk never exceed the budget: room is made, on disk, before anything is written.
    A blob is returned only if its size and SHA-256 are those of the manifest; else its entry goes to quarantine.
    Reading never waits for writing: the lock guards the index in memory and is never held during disk work.

    <root>/lock                                  one process owns the folder
    <root>/incoming/                             being written or removed; emptied at the start
    <root>/entries/<partition>/<name>.<nonce>/   manifest.json, blobs, perhaps pin.json
    <root>/quarantine/                           what failed its check, oldest first to go

    writing -> ready -> removed (evicted, expired, replaced, purged) | quarantined
"""

from __future__ import annotations

import fcntl
import hashlib
import heapq
import json
import logging
import os
import re
import secrets
import shutil
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

SCHEMA = 1
"""Of the folder and its manifests; another one is not read."""

_BLOCK = 4096
"""Bytes a file system hands out at once: files and folders are counted in whole blocks, as `du` would."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,79}")
_BLOB = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,79}")
_RESERVED = frozenset({"manifest.json", "pin.json"})

logger = logging.getLogger(__name__)


class EntryKey(NamedTuple):
    """Where an entry lives: letters, digits, `_` and `-`, at most 80 of them in each part."""

    partition: str
    name: str


@dataclass(frozen=True)
class Pin:
    """A reason not to evict an entry before `until` (Unix seconds)."""

    owner: str
    until: float


@dataclass(frozen=True)
class Entry:
    """What is known of a ready entry without opening it.  Times are Unix seconds."""

    key: EntryKey
    folder: Path
    blobs: Mapping[str, int]
    """Bytes by blob."""
    facts: Mapping[str, Any]
    """The owner's own plain data."""
    created: float
    expires: float | None
    last_used: float
    disk_bytes: int
    """Whole blocks of all its files."""
    pin: Pin | None = None


class StoreError(RuntimeError):
    """The store cannot be opened."""


class SaveRefused(RuntimeError):
    """An entry is not stored.  `reason`: too_large, budget_pinned, disk_full or busy (its key is being written)."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(reason, message)
        self.reason, self.message = reason, message

    def __str__(self) -> str:
        return self.message


class BlobMissing(LookupError):
    """The entry is not there, or no more.  `reason`: blob_missing or expired."""

    def __init__(self, key: EntryKey, reason: str) -> None:
        super().__init__(key, reason)
        self.key, self.reason = key, reason

    def __str__(self) -> str:
        return f"entry {self.key.name}: {self.reason}"


class BlobCorrupt(RuntimeError):
    """The entry failed its check; it is in quarantine now."""

    def __init__(self, key: EntryKey, fault: str) -> None:
        super().__init__(key, fault)
        self.key, self.fault = key, fault

    def __str__(self) -> str:
        return f"entry {self.key.name}: {self.fault}"


Gone = Callable[[Entry, str], None]
"""Told of every entry that leaves the index and why: evicted, expired, replaced, purged, quarantined, blob_missing."""


class BlobStore:
    """One process's entries under one folder.  Safe to use from any thread.

    root: made if absent.  budget_bytes: of everything below it.  max_entries: ready ones; None: as many as fit.
    gone: called without the lock held.
    Raises StoreError when another process owns the folder or it cannot be written.  `load` must run before `put`.
    """

    def __init__(
        self,
        root: Path,
        budget_bytes: int,
        gone: Gone = lambda entry, reason: None,
        max_entries: int | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.root, self.budget_bytes, self.max_entries = root, budget_bytes, max_entries
        self._gone, self._clock = gone, clock
        self._lock = threading.Lock()
        self._entries: OrderedDict[EntryKey, Entry] = OrderedDict()
        """Least recently used first."""
        self._readers: dict[EntryKey, int] = {}
        self._writing: set[EntryKey] = set()
        self._expiry: list[tuple[float, EntryKey]] = []
        self._bytes = 0
        """On disk or promised to a writer, quarantine included."""
        try:
            for folder in ("incoming", "entries", "quarantine"):
                (root / folder).mkdir(parents=True, exist_ok=True)
            self._owned = os.open(root / "lock", os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise StoreError(
                f"root: {root} cannot be written: {error}; name a folder this process may write"
            ) from error
        try:
            fcntl.flock(self._owned, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._owned)
            raise StoreError(
                f"root: {root} belongs to another running cache; stop it or name another folder"
            ) from error

    def close(self) -> None:
        """Give the folder up."""
        os.close(self._owned)

    # --- start -----------------------------------------------------------------------------------------------------

    def load(self) -> Iterator[Entry]:
        """Read what an earlier process left, oldest use first, and yield each ready entry as it joins the index.

        Torn folders and leftovers of dead writers are removed, unreadable manifests go to quarantine, and what exceeds
        a budget that has shrunk is evicted.  To be exhausted once, before the first `put`.
        """
        for leftover in (self.root / "incoming").iterdir():
            if leftover.is_dir():
                shutil.rmtree(leftover)
            else:
                leftover.unlink()  # a pin half written
        self._bytes = sum(_disk_bytes(folder) for folder in (self.root / "quarantine").iterdir())
        found: list[tuple[float, Path]] = []
        for partition in (self.root / "entries").iterdir():
            found += [(folder.stat().st_mtime, folder) for folder in partition.iterdir()]
        for last_used, folder in sorted(found):
            try:
                entry = _read_manifest(folder, last_used)
            except (OSError, ValueError, KeyError, TypeError) as error:
                logger.warning("%s goes to quarantine: its manifest cannot be used: %r", folder, error)
                self._bytes += _disk_bytes(folder)
                self._to_quarantine(folder)
                continue
            older = self.get(entry.key)
            if older is not None and older.created >= entry.created:
                self._discard(folder)  # a writer died between publishing a newer one and removing this
                continue
            with self._lock:
                self._bytes += entry.disk_bytes
                self._entries.pop(entry.key, None)
                self._enter(entry)
            if older is not None:
                self._drop(older, "replaced")
            yield entry
        self._make_room(0)

    # --- entries ---------------------------------------------------------------------------------------------------

    def put(
        self,
        key: EntryKey,
        blobs: Mapping[str, bytes],
        facts: Mapping[str, Any],
        expires: float | None = None,
        replacing: bool = False,
    ) -> Entry | None:
        """Publish an entry and return it, or None if the key is ready already and `replacing` is False.

        A ready entry is never un-published by saving again: with `replacing` it stays readable until the new one is.
        Raises SaveRefused.
        """
        _check_names(key, blobs)
        created = self._clock()
        manifest = _manifest(key, blobs, facts, created, expires)
        size = _entry_bytes([len(manifest), *map(len, blobs.values())])
        with self._lock:
            older = self._entries.get(key)
            if older is not None and not replacing:
                return None
            if key in self._writing:
                raise SaveRefused("busy", f"entry {key.name} is being written by another save")
            self._writing.add(key)
        files = {**blobs, "manifest.json": manifest}
        if older is not None and older.pin is not None:
            files["pin.json"] = _pin_bytes(older.pin)
        incoming = self.root / "incoming" / secrets.token_hex(8)
        try:
            self._make_room(size)
            try:
                folder = self._write(incoming, files, key)
            except OSError as error:
                shutil.rmtree(incoming, ignore_errors=True)
                self._release(size)
                raise SaveRefused("disk_full", f"entry {key.name} cannot be written: {error}") from error
            pin = older.pin if older is not None else None
            sizes = {name: len(data) for name, data in blobs.items()}
            entry = Entry(key, folder, sizes, facts, created, expires, created, size, pin)
            with self._lock:
                older = self._entries.pop(key, None)
                self._enter(entry)
        finally:
            with self._lock:
                self._writing.discard(key)
        if older is not None:
            self._drop(older, "replaced")
        return entry

    def read(self, key: EntryKey, *names: str, use: bool = True) -> dict[str, bytes]:
        """The named blobs, checked; all of them when none is named.  Counts as a use unless `use` is False.

        Raises BlobMissing; BlobCorrupt after moving the entry to quarantine.
        """
        with self._lease(key, use) as entry:
            blobs = {}
            try:
                manifest = json.loads((entry.folder / "manifest.json").read_bytes())["blobs"]
                for name in names or entry.blobs:
                    if name not in entry.blobs:
                        raise BlobMissing(key, "blob_missing")
                    blobs[name] = _checked((entry.folder / name).read_bytes(), name, manifest[name])
            except (OSError, ValueError, KeyError, TypeError) as error:
                if self.get(key) is not entry:
                    raise BlobMissing(key, "blob_missing") from error  # removed while it was read
                self._quarantine(entry)
                raise BlobCorrupt(key, str(error)) from error
        if use:
            with suppress(FileNotFoundError):  # removed since
                os.utime(entry.folder, (self._clock(), self._clock()))  # the order of use survives a restart
        return blobs

    def get(self, key: EntryKey) -> Entry | None:
        """The ready entry; no use is counted."""
        with self._lock:
            return self._entries.get(key)

    def entries(self) -> list[Entry]:
        """All ready entries, least recently used first."""
        with self._lock:
            return list(self._entries.values())

    def remove(self, key: EntryKey, reason: str = "purged") -> Entry | None:
        """Take an entry out of the index and off the disk; pinned ones too, as whoever asks named it."""
        with self._lock:
            entry = self._entries.pop(key, None)
        if entry is not None:
            self._drop(entry, reason)
        return entry

    def condemn(self, key: EntryKey) -> None:
        """Quarantine an entry whose blobs are what was saved, but not what they should be."""
        entry = self.get(key)
        if entry is not None:
            self._quarantine(entry)

    def pin(self, key: EntryKey, pin: Pin | None) -> Entry:
        """Set or take away an entry's pin.  Raises BlobMissing."""
        with self._lease(key, use=False) as entry:
            place = entry.folder / "pin.json"
            if pin is None:
                place.unlink(missing_ok=True)
            else:
                incoming = self.root / "incoming" / secrets.token_hex(8)
                _write_synced(incoming, _pin_bytes(pin))
                incoming.replace(place)
            with self._lock:
                if self._entries.get(key) is not entry:
                    raise BlobMissing(key, "blob_missing")
                self._entries[key] = pinned = replace(entry, pin=pin)
        return pinned

    def sweep(self) -> int:
        """Remove entries whose time is over; how many."""
        removed = 0
        while True:
            with self._lock:
                if not self._expiry or self._expiry[0][0] > self._clock():
                    return removed
                expires, key = heapq.heappop(self._expiry)
                entry = self._entries.get(key)
                if entry is None or entry.expires != expires or self._is_pinned(entry):
                    continue
                del self._entries[key]
            self._drop(entry, "expired")
            removed += 1

    @property
    def disk_bytes(self) -> int:
        """Bytes below the root in whole blocks, those promised to writers included; at most the budget."""
        with self._lock:
            return self._bytes

    # --- inside ----------------------------------------------------------------------------------------------------

    @contextmanager
    def _lease(self, key: EntryKey, use: bool) -> Iterator[Entry]:
        """While it lasts the entry is no victim of eviction."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                raise BlobMissing(key, "blob_missing")
            if entry.expires is not None and entry.expires <= self._clock() and not self._is_pinned(entry):
                raise BlobMissing(key, "expired")
            if use:
                self._entries.move_to_end(key)
            self._readers[key] = self._readers.get(key, 0) + 1
        try:
            yield entry
        finally:
            with self._lock:
                self._readers[key] -= 1
                if not self._readers[key]:
                    del self._readers[key]

    def _make_room(self, size: int) -> None:
        """Evict, on disk, until `size` fits, then promise it to the caller.  Raises SaveRefused."""
        if size > self.budget_bytes:
            raise SaveRefused("too_large", f"an entry of {size} bytes exceeds the whole budget of {self.budget_bytes}")
        self.sweep()
        while True:
            with self._lock:
                full = self.max_entries is not None and len(self._entries) + bool(size) > self.max_entries
                if self._bytes + size <= self.budget_bytes and not full:
                    self._bytes += size
                    return
                victim = next((e for e in self._entries.values() if self._may_go(e)), None)
                if victim is not None:
                    del self._entries[victim.key]
            if victim is not None:
                self._drop(victim, "evicted")
            elif not self._empty_quarantine():
                raise SaveRefused(
                    "budget_pinned",
                    f"{size} bytes do not fit into the budget of {self.budget_bytes}: the rest is pinned or in use",
                )

    def _may_go(self, entry: Entry) -> bool:
        return not self._is_pinned(entry) and entry.key not in self._readers

    def _is_pinned(self, entry: Entry) -> bool:
        return entry.pin is not None and entry.pin.until > self._clock()

    def _write(self, incoming: Path, files: Mapping[str, bytes], key: EntryKey) -> Path:
        """Every byte is on the disk before the rename makes the entry visible."""
        incoming.mkdir()
        for name, data in files.items():
            _write_synced(incoming / name, data)
        _sync(incoming)
        partition = self.root / "entries" / key.partition
        partition.mkdir(exist_ok=True)
        folder = partition / f"{key.name}.{incoming.name}"
        incoming.rename(folder)
        _sync(partition)
        return folder

    def _enter(self, entry: Entry) -> None:
        self._entries[entry.key] = entry
        if entry.expires is not None:
            heapq.heappush(self._expiry, (entry.expires, entry.key))

    def _drop(self, entry: Entry, reason: str) -> None:
        self._discard(entry.folder)
        self._release(entry.disk_bytes)
        self._gone(entry, reason)

    def _discard(self, folder: Path) -> None:
        """Un-publish by one rename, then remove: a kill in between leaves a leftover, not half an entry."""
        trash = self.root / "incoming" / secrets.token_hex(8)
        try:
            folder.rename(trash)
        except FileNotFoundError:
            return  # whoever works on the folder by hand was quicker
        shutil.rmtree(trash)

    def _release(self, size: int) -> None:
        with self._lock:
            self._bytes -= size

    def _quarantine(self, entry: Entry) -> None:
        with self._lock:
            if self._entries.get(entry.key) is not entry:
                return  # another reader found the fault first
            del self._entries[entry.key]
        self._to_quarantine(entry.folder)
        self._gone(entry, "quarantined")

    def _to_quarantine(self, folder: Path) -> None:
        try:
            folder.rename(self.root / "quarantine" / f"{time.time_ns()}-{folder.name}")
        except FileNotFoundError:
            logger.warning("%s is gone from the disk", folder)

    def _empty_quarantine(self) -> bool:
        """Remove its oldest folder; False when there is none."""
        for folder in sorted((self.root / "quarantine").iterdir()):
            size = _disk_bytes(folder)
            self._discard(folder)
            self._release(size)
            return True
        return False


def _check_names(key: EntryKey, blobs: Mapping[str, bytes]) -> None:
    for part in key:
        if not _NAME.fullmatch(part):
            raise ValueError(f"key: got {part!r}, expected letters, digits, '_' and '-', at most 80")
    for name in blobs:
        if not _BLOB.fullmatch(name) or name in _RESERVED:
            raise ValueError(f"blob: got {name!r}, expected letters, digits, '_', '.' and '-', not a name of the store")


def _manifest(
    key: EntryKey, blobs: Mapping[str, bytes], facts: Mapping[str, Any], created: float, expires: float | None
) -> bytes:
    body = {
        "schema": SCHEMA,
        "partition": key.partition,
        "name": key.name,
        "created": created,
        "expires": expires,
        "facts": facts,
        "blobs": {n: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()} for n, data in blobs.items()},
    }
    return json.dumps({**body, "sha256": _digest(body)}, allow_nan=False).encode()


def _read_manifest(folder: Path, last_used: float) -> Entry:
    """Raises ValueError, KeyError, TypeError or OSError for anything but a whole entry of this schema."""
    raw = (folder / "manifest.json").read_bytes()
    body = json.loads(raw)
    stated = body.pop("sha256")
    if stated != _digest(body):
        raise ValueError("manifest.json: its SHA-256 differs from the one it states")
    if body["schema"] != SCHEMA:
        raise ValueError(f"manifest.json: schema {body['schema']}, this program reads {SCHEMA}")
    blobs = {name: blob["bytes"] for name, blob in body["blobs"].items()}
    for name, size in blobs.items():
        if (folder / name).stat().st_size != size:
            raise ValueError(f"{name}: {(folder / name).stat().st_size} bytes, the manifest says {size}")
    place = folder / "pin.json"
    pin = Pin(**json.loads(place.read_bytes())) if place.exists() else None
    size = _entry_bytes([len(raw), *blobs.values()])
    key = EntryKey(body["partition"], body["name"])
    return Entry(key, folder, blobs, body["facts"], body["created"], body["expires"], last_used, size, pin)


def _checked(data: bytes, name: str, stated: Mapping[str, Any]) -> bytes:
    if len(data) != stated["bytes"]:
        raise ValueError(f"{name}: {len(data)} bytes, the manifest says {stated['bytes']}")
    if hashlib.sha256(data).hexdigest() != stated["sha256"]:
        raise ValueError(f"{name}: its SHA-256 differs from the manifest's")
    return data


def _digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _pin_bytes(pin: Pin) -> bytes:
    return json.dumps({"owner": pin.owner, "until": pin.until}).encode()


def _entry_bytes(files: list[int]) -> int:
    """Whole blocks of the files, one of the folder and one kept for a pin."""
    return sum(-(-size // _BLOCK) * _BLOCK for size in files) + 2 * _BLOCK


def _disk_bytes(folder: Path) -> int:
    return _entry_bytes([file.stat().st_size for file in folder.iterdir() if file.name != "pin.json"])


def _write_synced(path: Path, data: bytes) -> None:
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
