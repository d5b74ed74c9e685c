"""The forest: prefixes, leaves, and the order in which nodes may go."""

from __future__ import annotations

from cache_actors.keys import path_keys
from cache_actors.prefix_trie import Node, PrefixTrie

ROOT, OTHER = b"r" * 32, b"s" * 32
URD = [b"u", b"u", b"r", b"r", b"d", b"d"]


def grow(trie: PrefixTrie, actions: list[bytes], root: bytes = ROOT, now: float = 0.0) -> list[bytes]:
    keys, parent = path_keys(root, actions), root
    for depth, key in enumerate(keys, start=1):
        trie.insert(Node(key, root, parent, depth, now))
        trie.touch(key, now)
        parent = key
    return keys


def test_match_is_the_longest_known_prefix() -> None:
    trie = PrefixTrie()
    assert trie.match(path_keys(ROOT, URD)) == []
    keys = grow(trie, URD)
    assert [node.key for node in trie.match(keys)] == keys
    assert [node.depth for node in trie.match(path_keys(ROOT, [*URD[:4], b"x", b"x"]))] == [1, 2, 3, 4]
    assert len(trie.match(path_keys(ROOT, [*URD, b"w"]))) == 6
    assert trie.match(path_keys(OTHER, URD)) == []


def test_a_fork_shares_its_prefix() -> None:
    trie = PrefixTrie()
    main = grow(trie, URD)
    fork = grow(trie, [*URD[:4], b"x", b"x"])
    assert len(trie) == 8
    assert fork[:4] == main[:4]
    assert not trie.is_leaf(main[3])
    assert [node.key for node in trie.removable()] == [main[5], fork[5]]


def test_inserting_again_keeps_the_node() -> None:
    trie = PrefixTrie()
    (key,) = grow(trie, [b"u"])
    node = trie.get(key)
    assert node is not None
    node.has_frames = True
    assert trie.insert(Node(key, ROOT, ROOT, 1, 9.0)) is node


def test_leaves_go_by_use_and_pinned_ones_stay() -> None:
    trie = PrefixTrie()
    a, b = grow(trie, [b"a1", b"a2"], now=1), grow(trie, [b"b1", b"b2"], now=2)
    assert [node.key for node in trie.removable()] == [a[1], b[1]]
    trie.touch(a[1], 3)
    assert [node.key for node in trie.removable()] == [b[1], a[1]]
    pinned = trie.get(b[1])
    assert pinned is not None
    pinned.pinned = True
    assert [node.key for node in trie.removable()] == [a[1]]
    trie.remove(a[1])
    assert [node.key for node in trie.removable()] == [a[0]]
    trie.remove(a[0])
    assert list(trie.removable()) == []
    assert not trie.world_is_empty(ROOT)


def test_a_use_counts_for_all_before_it_and_never_backwards() -> None:
    trie = PrefixTrie()
    keys = grow(trie, URD, now=5)
    trie.touch(keys[3], 9)
    trie.touch(keys[5], 7)
    assert [node.used for node in trie.match(keys)] == [9, 9, 9, 9, 7, 7]


def test_a_lost_node_leaves_its_descendants_until_it_is_back() -> None:
    trie = PrefixTrie()
    keys = grow(trie, URD)
    trie.remove(keys[3])
    assert len(trie.match(keys)) == 3
    assert keys[4] in trie
    trie.insert(Node(keys[3], ROOT, keys[2], 4, 0.0))
    assert len(trie.match(keys)) == 6
    assert not trie.is_leaf(keys[3])


def test_an_empty_world() -> None:
    trie = PrefixTrie()
    assert trie.world_is_empty(ROOT)
    (key,) = grow(trie, [b"u"])
    assert not trie.world_is_empty(ROOT)
    trie.remove(key)
    assert trie.remove(key) is None
    assert trie.world_is_empty(ROOT)
