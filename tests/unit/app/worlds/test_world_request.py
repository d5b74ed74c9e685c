"""How keys and poses are laid out over chunks: 4 video frames a latent one, the first latent of a world aside."""

from __future__ import annotations

import numpy as np
import pytest

from app.worlds.world_request import ChunkRequest, Hold, Moves, PoseGrid, chunk_controls
from deployments.lingbot.controls import Keys, Poses


def held(request: ChunkRequest, first: int) -> list[str]:
    """A string a chunk: its frames' keys, joined; ``.`` where the camera rests."""
    cameras = [controls.camera for controls in chunk_controls(request, first, 2)]
    return ["".join("".join(sorted(f)) or "." for f in c.frames) for c in cameras if isinstance(c, Keys)]


def test_held_keys_fill_whole_chunks():
    assert held(ChunkRequest(camera=Hold(keys="w", chunks=2)), 0) == ["wwww", "wwwwwwww"]
    assert held(ChunkRequest(camera=Hold(keys="", chunks=1)), 3) == ["........"]


@pytest.mark.parametrize(
    ("first", "expected"),
    [(0, ["wwwd", "dddd...."]), (1, ["wwwddddd"])],
)
def test_moves_follow_one_another_and_the_camera_rests_at_the_end(first: int, expected: list[str]):
    assert held(ChunkRequest(camera=Moves(moves=(("w", 3), ("d", 5)))), first) == expected


def test_poses_are_cut_into_chunks():
    matrices = np.stack([np.eye(4)] * 4)
    matrices[:, 0, 3] = [1, 2, 3, 4]
    grid = Poses.of(matrices).grid
    cameras = [c.camera for c in chunk_controls(ChunkRequest(camera=PoseGrid(grid=grid)), 0, 2)]
    assert [c.matrices()[:, 0, 3].tolist() for c in cameras if isinstance(c, Poses)] == [[1, 2], [3, 4]]


def test_a_prompt_changes_with_the_first_chunk():
    request = ChunkRequest(camera=Hold(keys="w", chunks=3), prompt="rain")
    assert [c.prompt for c in chunk_controls(request, 5, 2)] == ["rain", None, None]
