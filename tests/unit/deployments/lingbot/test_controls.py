"""Canonical requests: equal meaning is equal bytes, and the bytes are what is computed with."""

from __future__ import annotations

import numpy as np
import pytest

from deployments.lingbot.controls import ChunkControls, Keys, Poses, key_frames, parse_keys


def shifted(x: float) -> np.ndarray:
    pose = np.eye(4)
    pose[0, 3] = x
    return pose


def test_keys_in_any_order_are_the_same_bytes() -> None:
    a = ChunkControls(Keys((frozenset("wi"), frozenset())))
    b = ChunkControls(Keys((frozenset("iw"), frozenset())))
    assert a.canonical() == b.canonical()
    assert a.canonical() == b'{"camera":{"frames":["wi",""],"mode":"keys"},"prompt":null,"version":1}'
    assert ChunkControls.from_canonical(a.canonical()) == a


def test_poses_that_round_alike_are_one_request_and_are_used_rounded() -> None:
    near, same = Poses.of([shifted(0.1)]), Poses.of([shifted(0.1 + 4e-7)])
    assert ChunkControls(near).canonical() == ChunkControls(same).canonical()
    assert np.array_equal(same.matrices(), near.matrices())
    assert ChunkControls(Poses.of([shifted(0.1 + 6e-7)])).canonical() != ChunkControls(near).canonical()
    again = ChunkControls.from_canonical(ChunkControls(near, "rain").canonical())
    assert again == ChunkControls(near, "rain")


def test_minus_zero_is_zero() -> None:
    assert Poses.of([shifted(-0.0)]) == Poses.of([shifted(0.0)])


def test_everything_that_differs_is_in_the_bytes() -> None:
    requests = [
        ChunkControls(Keys((frozenset("w"),) * 8)),
        ChunkControls(Keys((frozenset("w"),) * 7 + (frozenset(),))),
        ChunkControls(Keys((frozenset("w"),) * 9)),
        ChunkControls(Keys((frozenset("w"),) * 8), "rain"),
        ChunkControls(Keys((frozenset("w"),) * 8), ""),
        ChunkControls(Poses.of([shifted(0)])),
        ChunkControls(Poses.of([shifted(0)] * 2)),
        ChunkControls(Poses.of([shifted(0), shifted(1e-6)])),
    ]
    assert len({request.canonical() for request in requests}) == len(requests)


@pytest.mark.parametrize(
    ("matrices", "message"),
    [
        (np.eye(4), r"poses: got shape \[4, 4\]"),
        ([shifted(float("nan"))], "not finite"),
        ([shifted(2e6)], "beyond 1e"),
        ([2 * np.eye(4)], "not orthonormal"),
        ([np.diag([-1.0, 1, 1, 1])], "reflection"),
        ([np.ones((4, 4))], "poses: expected camera-to-world"),
    ],
)
def test_what_is_no_pose_is_refused(matrices: np.ndarray, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Poses.of(matrices)


def test_a_request_of_the_wrong_length_is_refused() -> None:
    assert (key_frames(0, 3), key_frames(1, 3)) == (8, 12)
    ChunkControls(Keys((frozenset(),) * 8)).check(0, 3)
    with pytest.raises(ValueError, match="controls: got 8 frames of keys, expected 12 for chunk 1"):
        ChunkControls(Keys((frozenset(),) * 8)).check(1, 3)
    with pytest.raises(ValueError, match="controls: got 2 poses, expected 3 for chunk 0"):
        ChunkControls(Poses.of([shifted(0)] * 2)).check(0, 3)


def test_another_version_is_refused() -> None:
    with pytest.raises(ValueError, match="controls: got version 2, expected 1"):
        ChunkControls.from_canonical(b'{"version": 2}')


def test_text_form_of_keys() -> None:
    w, iw, none = frozenset("w"), frozenset("iw"), frozenset[str]()
    assert parse_keys("w-2,iw-1,none-3") == (w, w, iw, none, none, none)
    for text in ("w", "w-", "-3", "w-x", "q-1", "w-1.5"):
        with pytest.raises(ValueError, match="keys: got"):
            parse_keys(text)
