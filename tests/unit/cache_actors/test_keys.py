"""World and chunk keys: everything that decides pixels is in, nothing else is."""

from __future__ import annotations

import hashlib
from dataclasses import fields, replace
from typing import Any

import pytest

from cache_actors.keys import WorldMaterial, image_digest, node_key, path_keys, world_root
from tests.world_material import MATERIAL


def changed(value: Any) -> Any:
    """The smallest change of a value of each type."""
    match value:
        case bool():
            return not value
        case int():
            return value + 1
        case float():
            return value * (1 + 2**-52)
        case str():
            return value + " "
        case ():
            return ("e" * 64,)
        case tuple():
            return (*value[:-1], changed(value[-1]))
    raise TypeError(type(value))


@pytest.mark.parametrize("name", [field.name for field in fields(WorldMaterial)])
def test_every_item_alone_makes_another_world(name: str) -> None:
    other = replace(MATERIAL, **{name: changed(getattr(MATERIAL, name))})
    assert world_root(other) != world_root(MATERIAL)


def test_the_root_is_the_digest_of_length_prefixed_parts() -> None:
    content = MATERIAL.canonical()
    expected = hashlib.sha256()
    for part in (b"root", content):
        expected.update(len(part).to_bytes(8, "little") + part)
    assert world_root(MATERIAL) == expected.digest()
    assert WorldMaterial.from_canonical(content) == MATERIAL


def test_nothing_about_length_or_session_is_in_the_material() -> None:
    """A longer continuation of the same world must find its prefix."""
    names = {field.name for field in fields(WorldMaterial)}
    assert not {name for name in names if "frame" in name or "session" in name or "stage" in name or "length" in name}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -0.0])
def test_numbers_without_one_meaning_are_refused(value: float) -> None:
    with pytest.raises(ValueError, match="move_step: got"):
        replace(MATERIAL, move_step=value)
    with pytest.raises(ValueError, match="intrinsics: got"):
        replace(MATERIAL, intrinsics=(1.0, 1.0, 1.0, value))


def test_a_missing_or_unknown_item_is_an_error() -> None:
    content = MATERIAL.canonical()
    with pytest.raises(TypeError):
        WorldMaterial.from_canonical(content.replace(b'"seed":1,', b""))
    with pytest.raises(TypeError):
        WorldMaterial.from_canonical(content.replace(b'"seed":1,', b'"seed":1,"frame_num":81,'))


def test_nodes_chain() -> None:
    root = world_root(MATERIAL)
    a, ab = path_keys(root, [b"a", b"b"])
    assert a == node_key(root, b"a")
    assert ab == node_key(a, b"b")
    # Moving a byte between parts, another order and another parent are other nodes.
    others = [node_key(root, b"ab"), node_key(root, b"b"), *path_keys(root, [b"b", b"a"]), node_key(ab, b"b")]
    assert len({a, ab, *others}) == 2 + len(set(others))
    assert path_keys(root, [b"a", b"b", b"c"])[:2] == [a, ab]
    with pytest.raises(ValueError, match="parent: got 31 bytes"):
        node_key(a[:-1], b"a")


def test_image_digest_is_of_pixels_and_size() -> None:
    pixels = bytes(range(12))
    assert image_digest(pixels, 2, 2) != image_digest(pixels, 1, 4)
    assert image_digest(pixels, 2, 2) != image_digest(bytes([1, *pixels[1:]]), 2, 2)
    with pytest.raises(ValueError, match="image: got 12 bytes for 2x3 RGB pixels, expected 18"):
        image_digest(pixels, 2, 3)
