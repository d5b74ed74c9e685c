"""Rotary positions against the definition, and without an end."""

from __future__ import annotations

from math import atan2

import pytest
import torch

from deployments.lingbot.rope import rotary_table, rotate


def test_axes_share_the_channels() -> None:
    table = rotary_table(0, (1, 1, 1), 128)
    assert table.shape == (1, 1, 64)
    # head_dim 16: 8 channels of time, 4 of rows, 4 of columns, so 4 + 2 + 2 angles.
    angle = rotary_table(5, (2, 3, 4), 16).angle().view(2, 3, 4, 8)
    # Angles are unique up to a whole turn; position 5 or 6 times frequency 1 stays comparable through atan2.
    f, h, w = 1, 2, 3
    expected = [6 / 10000 ** (i / 4) for i in range(4)] + [2 / 10000 ** (i / 2) for i in range(2)]
    expected += [3 / 10000 ** (i / 2) for i in range(2)]
    for got, want in zip(angle[f, h, w], expected, strict=True):
        want_angle = torch.tensor(want, dtype=torch.float64)
        assert got.item() == pytest.approx(atan2(want_angle.sin(), want_angle.cos()), abs=1e-12)


def test_rotation_turns_pairs() -> None:
    x = torch.tensor([[[[3.0, 4.0]]]])
    table = torch.tensor([[[1j]]], dtype=torch.complex128)
    assert rotate(x, table).flatten().tolist() == [-4.0, 3.0]


def test_there_is_no_last_frame() -> None:
    """The upstream table ends at frame 1024, 4 min 16 s."""
    far, near = rotary_table(5000, (2, 1, 1), 16), rotary_table(5001, (1, 1, 1), 16)
    assert torch.equal(far[1:], near)
