"""Chunks of all worlds on disk, shared by every session, replica and process restart.

    value = pure function of its key: a chunk's latents and controls, and optionally its frames

Invariants
    A chunk is found only once its bytes are on the disk; a damaged one is never returned, it goes to quarantine.
    Putting a chunk again changes nothing.
    Frames go first when room is needed (latents give them back), then leaves of the trie, least recently used first.
    The lock guards the index in memory and is never held during disk work; readers wait for no writer.

A root is stored with the material of its key, and compared when the world is opened again.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from cache_actors.blob_store import BlobCorrupt, BlobMissing, BlobStore, Entry, EntryKey, Pin, SaveRefused
from cache_actors.keys import Key, WorldMaterial, node_key, path_keys, world_root
from cache_actors.prefix_trie import Node, PrefixTrie

_BLOCK = 4096
_ROOT_NAME = "root"
_FRAMES_END = "-frames"
_FOREVER = float(1 << 53)


class NodeGone(LookupError):
    """A chunk, or its frames, cannot be had any more: evicted, expired, or damaged and put aside."""


class RootMismatch(RuntimeError):
    """Two different worlds with one root key: the stored material is not the caller's."""


@dataclass(frozen=True)
class Found:
    """What is known of one chunk."""

    key: Key
    depth: int
    """Chunks up to and including this one."""
    has_frames: bool
    kv_holders: frozenset[str]
    """Who keeps its keys and values in memory; they may have dropped them since."""


class WorldCache:
    """Safe to use from any thread.

    folder: owned by one process at a time, made if absent.  budget_bytes: of everything below it.
    ttl_s: a chunk unused for so long may go; None keeps all that fits.
    Raises `blob_store.StoreError` when the folder cannot be had.
    """

    def __init__(
        self, folder: Path, budget_bytes: int, ttl_s: float | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        self._ttl, self._clock = ttl_s, clock
        self._lock = threading.Lock()
        self._trie = PrefixTrie()
        self._counts: Counter[str] = Counter()
        self._store = BlobStore(folder, budget_bytes, self._left, clock=clock)
        self._budget = budget_bytes
        self._load()

    def close(self) -> None:
        """Give the folder up."""
        self._store.close()

    def open_world(self, material: WorldMaterial) -> Key:
        """The world's root key, stored with its material.  Raises RootMismatch, `blob_store.SaveRefused`."""
        root, content = world_root(material), material.canonical()
        key = EntryKey(root.hex(), _ROOT_NAME)
        try:
            known = self._store.read(key)["material"]
        except (BlobMissing, BlobCorrupt):
            self._make_room(len(content))
            self._store.put(key, {"material": content}, {})
            return root
        if known != content:
            raise RootMismatch(f"world {root.hex()}: its stored material is not that of the request")
        return root

    def find(self, key: Key) -> Found | None:
        """One chunk, by the key it would have; a use of it and of all before it."""
        with self._lock:
            node = self._trie.get(key)
            self._counts["hit" if node else "miss"] += 1
            if node is None:
                return None
            self._trie.touch(key, self._clock())
            return _found(node)

    def match(self, root: Key, actions: Sequence[bytes]) -> list[Found]:
        """The longest known prefix of a path of canonical controls; a use of all of it."""
        keys = path_keys(root, list(actions))
        with self._lock:
            nodes = self._trie.match(keys)
            self._counts["hit"] += len(nodes)
            self._counts["miss"] += len(keys) - len(nodes)
            if nodes:
                self._trie.touch(nodes[-1].key, self._clock())
            return [_found(node) for node in nodes]

    def put(self, root: Key, parent: Key, action: bytes, journal: bytes) -> Key:
        """Store a chunk after `parent` (a node, or the root) and return its key.

        journal: what `read` gives back.  Raises KeyError for an unknown parent, `blob_store.SaveRefused` without room.
        """
        key = node_key(parent, action)
        with self._lock:
            before = self._trie.get(parent)
            if before is None and parent != root:
                raise KeyError(f"parent {parent.hex()} of world {root.hex()} is not known")
            depth = before.depth + 1 if before else 1
            if key in self._trie:
                self._trie.touch(key, self._clock())
                return key
        self._make_room(len(journal) + len(action))
        facts = {"parent": parent.hex(), "depth": depth}
        try:
            self._store.put(_entry_key(root, key), {"journal": journal, "action": action}, facts)
        except SaveRefused as refused:
            if refused.reason != "busy":
                raise
            return key  # another session is storing the same chunk
        with self._lock:
            self._trie.insert(Node(key, root, parent, depth, self._clock()))
            self._trie.touch(key, self._clock())
            self._counts["stored"] += 1
        return key

    def read(self, key: Key) -> bytes:
        """A chunk's journal entry, checked against its digest and its key.  Raises NodeGone."""
        node = self._known(key)
        entry = _entry_key(node.root, key)
        blobs = self._checked_read(entry)
        if node_key(node.parent, blobs["action"]) != key:
            self._store.remove(entry, "quarantined")
            raise NodeGone(f"chunk {key.hex()}: its stored controls do not make its key")
        return blobs["journal"]

    def put_frames(self, key: Key, frames: bytes) -> None:
        """Store a chunk's encoded frames.  Raises NodeGone, or `blob_store.SaveRefused` without room."""
        node = self._known(key)
        self._make_room(len(frames))
        try:
            self._store.put(_frames_key(node.root, key), {"frames": frames}, {})
        except SaveRefused as refused:
            if refused.reason != "busy":
                raise
            return
        with self._lock:
            node.has_frames = True

    def read_frames(self, key: Key) -> bytes:
        """A chunk's encoded frames.  Raises NodeGone."""
        return self._checked_read(_frames_key(self._known(key).root, key))["frames"]

    def pin(self, key: Key, owner: str) -> None:
        """Keep a chunk, and with it all before it, until `unpin`; also across restarts.  Raises NodeGone."""
        self._set_pin(key, Pin(owner, _FOREVER))

    def unpin(self, key: Key) -> None:
        """Let a chunk go again.  Raises NodeGone."""
        self._set_pin(key, None)

    def evict(self, key: Key) -> bool:
        """Drop one chunk and its frames; False, unchanged, if it is pinned, unknown or others come after it."""
        with self._lock:
            node = self._trie.get(key)
            if node is None or node.pinned or not self._trie.is_leaf(key):
                return False
            self._trie.remove(key)
        self._erase(node, "evicted")
        return True

    def note_kv(self, holder: str, key: Key) -> None:
        """`holder` keeps a chunk's keys and values in memory.  Unknown chunks are ignored: they are gone."""
        with self._lock:
            if (node := self._trie.get(key)) is not None:
                node.kv_holders.add(holder)

    def forget_kv(self, holder: str, key: Key | None = None) -> None:
        """`holder` has dropped a chunk's keys and values, or is gone with all of them (None)."""
        with self._lock:
            nodes = self._trie.nodes() if key is None else [n for n in (self._trie.get(key),) if n]
            for node in nodes:
                node.kv_holders.discard(holder)

    def sweep(self) -> int:
        """Drop chunks unused for longer than the TTL, leaves first; how many."""
        removed = 0
        while self._ttl is not None:
            with self._lock:
                node = next(self._trie.removable(), None)
                if node is None or node.used > self._clock() - self._ttl:
                    break
                self._trie.remove(node.key)
            self._erase(node, "expired")
            removed += 1
        return removed

    def stats(self) -> dict[str, int]:
        """``chunks``, ``disk_bytes``, ``budget_bytes``; counts of ``hit``, ``miss``, ``stored`` and why chunks went."""
        with self._lock:
            counts, chunks = dict(self._counts), len(self._trie)
        return {
            "chunks": chunks,
            "disk_bytes": self._store.disk_bytes,
            "budget_bytes": self._budget,
            **{name: counts.get(name, 0) for name in ("hit", "miss", "stored", "evicted", "expired", "quarantined")},
        }

    # --- inside ----------------------------------------------------------------------------------------------------

    def _load(self) -> None:
        """Rebuild the index from the manifests alone; blobs are checked when they are read."""
        framed = set()
        for entry in self._store.load():
            name = entry.key.name
            if name.endswith(_FRAMES_END):
                framed.add(bytes.fromhex(name.removesuffix(_FRAMES_END)))
            elif name != _ROOT_NAME:
                key, parent = bytes.fromhex(name), bytes.fromhex(entry.facts["parent"])
                root, pinned = bytes.fromhex(entry.key.partition), entry.pin is not None
                self._trie.insert(Node(key, root, parent, entry.facts["depth"], entry.last_used, pinned))
        for node in sorted(self._trie.nodes(), key=lambda node: node.used):
            node.has_frames = node.key in framed
            self._trie.touch(node.key, node.used)

    def _known(self, key: Key) -> Node:
        with self._lock:
            node = self._trie.get(key)
        if node is None:
            raise NodeGone(f"chunk {key.hex()} is not known")
        return node

    def _checked_read(self, entry: EntryKey) -> dict[str, bytes]:
        try:
            return self._store.read(entry)
        except (BlobMissing, BlobCorrupt) as error:
            raise NodeGone(str(error)) from error

    def _set_pin(self, key: Key, pin: Pin | None) -> None:
        node = self._known(key)
        try:
            self._store.pin(_entry_key(node.root, key), pin)
        except BlobMissing as error:
            raise NodeGone(str(error)) from error
        with self._lock:
            node.pinned = pin is not None

    def _make_room(self, size: int) -> None:
        """Let frames, then leaves go until an entry of about `size` bytes fits.  What cannot be freed `put` refuses."""
        wanted = size + 6 * _BLOCK  # blocks half filled, the manifest, the folder
        if wanted > self._budget:
            return
        while self._store.disk_bytes + wanted > self._budget:
            with self._lock:
                framed = next((node for node in self._trie.nodes() if node.has_frames and not node.pinned), None)
                leaf = None if framed else next(self._trie.removable(), None)
                if framed is not None:
                    framed.has_frames = False
                elif leaf is not None:
                    self._trie.remove(leaf.key)
                else:
                    return
            if framed is not None:
                self._store.remove(_frames_key(framed.root, framed.key), "frames_evicted")
            elif leaf is not None:
                self._erase(leaf, "evicted")

    def _erase(self, node: Node, reason: str) -> None:
        self._store.remove(_frames_key(node.root, node.key), "frames_evicted")
        self._store.remove(_entry_key(node.root, node.key), reason)
        with self._lock:
            empty = self._trie.world_is_empty(node.root)
        if empty:
            self._store.remove(EntryKey(node.root.hex(), _ROOT_NAME), "root_evicted")

    def _left(self, entry: Entry, reason: str) -> None:
        """An entry has left the store, whoever decided it: the index follows."""
        name = entry.key.name
        if name == _ROOT_NAME:
            return
        with self._lock:
            if name.endswith(_FRAMES_END):
                node = self._trie.get(bytes.fromhex(name.removesuffix(_FRAMES_END)))
                if node is not None:
                    node.has_frames = False
            else:
                self._trie.remove(bytes.fromhex(name))
                self._counts[reason] += 1


def _found(node: Node) -> Found:
    return Found(node.key, node.depth, node.has_frames, frozenset(node.kv_holders))


def _entry_key(root: Key, key: Key) -> EntryKey:
    return EntryKey(root.hex(), key.hex())


def _frames_key(root: Key, key: Key) -> EntryKey:
    return EntryKey(root.hex(), key.hex() + _FRAMES_END)
