"""Which chunks of which worlds are known, as a forest: a root a world, a node a chunk, a path a session's history.

A node's key already names its whole path (`keys.node_key`), so looking a path up is looking its keys up one by one
until one is missing.  Links are kept only downwards, to know the leaves: only a leaf may go, or what comes after it
would stay behind out of reach.  A node that is lost all the same (its blob was damaged) leaves its descendants, which
are found again once it is put back.

Not safe to use from several threads at once: `WorldCache` holds its lock.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from cache_actors.keys import Key


@dataclass
class Node:
    """One chunk."""

    key: Key
    root: Key
    parent: Key
    """A node's key, or the root's for a first chunk."""
    depth: int
    """Chunks up to and including this one, 1 for a first chunk."""
    used: float
    """Unix seconds of the last use."""
    pinned: bool = False
    has_frames: bool = False
    kv_holders: set[str] = field(default_factory=set)
    """Who keeps the chunk's keys and values."""


class PrefixTrie:
    """The forest of all worlds."""

    def __init__(self) -> None:
        self._nodes: OrderedDict[Key, Node] = OrderedDict()
        """Least recently used first; a path's nodes lie deepest first, so that leaves come before their ancestors."""
        self._children: dict[Key, set[Key]] = {}
        """By node or root, whether that is known itself or not."""

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, key: Key) -> bool:
        return key in self._nodes

    def get(self, key: Key) -> Node | None:
        """The node; no use is counted."""
        return self._nodes.get(key)

    def insert(self, node: Node) -> Node:
        """Add a node, or return the one that is there: putting a chunk again never un-publishes it."""
        present = self._nodes.setdefault(node.key, node)
        self._children.setdefault(node.parent, set()).add(node.key)
        return present

    def match(self, keys: Sequence[Key]) -> list[Node]:
        """The nodes of the longest known prefix of a path."""
        found = []
        for key in keys:
            node = self._nodes.get(key)
            if node is None:
                break
            found.append(node)
        return found

    def touch(self, key: Key, now: float) -> None:
        """Count a use of a node and of everything before it."""
        node = self._nodes.get(key)
        while node is not None:
            node.used = max(node.used, now)
            self._nodes.move_to_end(node.key)
            node = self._nodes.get(node.parent)

    def remove(self, key: Key) -> Node | None:
        """Forget a node; its descendants stay."""
        node = self._nodes.pop(key, None)
        if node is not None:
            siblings = self._children[node.parent]
            siblings.discard(key)
            if not siblings:
                del self._children[node.parent]
        return node

    def is_leaf(self, key: Key) -> bool:
        """Whether no known chunk comes after it."""
        return key not in self._children

    def removable(self) -> Iterator[Node]:
        """Leaves that are not pinned, least recently used first.  Not to be changed while iterating."""
        return (node for node in self._nodes.values() if not node.pinned and self.is_leaf(node.key))

    def nodes(self) -> Iterator[Node]:
        """All, least recently used first."""
        return iter(self._nodes.values())

    def world_is_empty(self, root: Key) -> bool:
        """Whether no first chunk of a world is known."""
        return root not in self._children
