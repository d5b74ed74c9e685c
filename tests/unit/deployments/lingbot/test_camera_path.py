"""The camera's path: hand-made moves."""

from __future__ import annotations

from math import cos, radians, sin

import numpy as np
import pytest

from deployments.lingbot.camera_path import CameraPolicy, CameraState, advance_camera
from deployments.lingbot.controls import ChunkControls, Keys, Poses

POLICY = CameraPolicy()


def held(keys: str, frames: int) -> ChunkControls:
    return ChunkControls(Keys((frozenset(keys),) * frames))


def test_the_first_chunk_begins_with_the_start_pose() -> None:
    poses, state = advance_camera(CameraState(), held("w", 8), True, POLICY)
    # Four frames of 0.05 along z a latent; the norm's 1e-6 shortens a step by a millionth.
    assert poses[:, 2, 3] == pytest.approx([0, 0.2, 0.4], rel=2e-6)
    later, _ = advance_camera(state, held("w", 12), False, POLICY)
    assert later[:, 2, 3] == pytest.approx([0.6, 0.8, 1.0], rel=2e-6)


@pytest.mark.parametrize(("keys", "axis", "sign"), [("w", 2, 1), ("s", 2, -1), ("d", 0, 1), ("a", 0, -1)])
def test_moves(keys: str, axis: int, sign: int) -> None:
    poses, _ = advance_camera(CameraState(), held(keys, 4), False, POLICY)
    expected = np.zeros(3)
    expected[axis] = sign * 0.2
    assert poses[0, :3, 3] == pytest.approx(expected, rel=2e-6)


def test_turns_look_where_the_keys_say() -> None:
    def looks(keys: str) -> np.ndarray:
        poses, _ = advance_camera(CameraState(), held(keys, 4), False, POLICY)
        return poses[0, :3, 2]

    s, c = sin(radians(8)), cos(radians(8))
    for keys, forward in {"l": (s, 0, c), "j": (-s, 0, c), "i": (0, -s, c), "k": (0, s, c)}.items():
        assert looks(keys) == pytest.approx(forward, abs=1e-12), keys


def test_opposite_keys_cancel_and_looking_up_does_not_lift() -> None:
    still, _ = advance_camera(CameraState(), held("wsadikjl", 4), False, POLICY)
    assert still[0] == pytest.approx(np.eye(4))
    poses, _ = advance_camera(CameraState(), held("iw", 4), False, POLICY)
    assert poses[0, 1, 3] == 0


def test_pitch_stops_before_its_limit() -> None:
    state = CameraState()
    for _ in range(5):
        poses, state = advance_camera(state, held("i", 12), False, POLICY)
    assert state.pitch == 84  # 86 would pass 85
    assert poses[-1, 1, 2] == pytest.approx(-sin(radians(84)))


def test_two_halves_equal_the_whole_path() -> None:
    """The pose after a chunk is all that the next one needs."""
    keys = tuple(frozenset(k) for k in ["wi", "w", "jw", "d"] * 6)
    whole, end = advance_camera(CameraState(), ChunkControls(Keys(keys)), False, POLICY)
    first, state = advance_camera(CameraState(), ChunkControls(Keys(keys[:12])), False, POLICY)
    second, end_of_second = advance_camera(state, ChunkControls(Keys(keys[12:])), False, POLICY)
    assert np.array_equal(whole, np.concatenate([first, second]))
    assert end == end_of_second


def test_given_poses_are_used_and_carried_and_leave_the_pitch() -> None:
    pose = np.eye(4)
    pose[:3, 3] = [1, 2, 3]
    poses, state = advance_camera(CameraState(pitch=10), ChunkControls(Poses.of([np.eye(4), pose])), True, POLICY)
    assert np.array_equal(poses[1], pose)
    assert np.array_equal(state.matrix(), pose)
    assert state.pitch == 10
