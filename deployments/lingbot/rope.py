"""Rotary positions of latent frames, rows and columns.  Angles are computed when needed, so a world has no last frame.

Axes: N tokens in (frame, row, column) order, H heads, E head channels.
"""

from __future__ import annotations

import torch
from torch import Tensor

THETA = 10000.0


def rotary_table(first_frame: int, grid: tuple[int, int, int], head_dim: int) -> Tensor:
    """Unit complex numbers [N, 1, E / 2] complex128, on the CPU.

    first_frame: absolute latent frame of the first row of tokens.  grid: frames, rows and columns of tokens.
    Of head_dim, 2 * (head_dim // 6) channels each turn with row and column, the rest with the frame: 128 is 44, 42, 42.
    """
    spatial = 2 * (head_dim // 6)
    frames, rows, columns = grid
    parts = [
        _axis(torch.arange(first_frame, first_frame + frames), head_dim - 2 * spatial).view(frames, 1, 1, -1),
        _axis(torch.arange(rows), spatial).view(1, rows, 1, -1),
        _axis(torch.arange(columns), spatial).view(1, 1, columns, -1),
    ]
    return torch.cat([part.expand(*grid, -1) for part in parts], dim=-1).reshape(frames * rows * columns, 1, -1)


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """x: [1, N, H, E] fp32; neighbouring channels are a complex number.  Returns fp32, computed in fp64."""
    turned = torch.view_as_complex(x.double().unflatten(-1, (-1, 2))) * table
    return torch.view_as_real(turned).flatten(-2).float()


def _axis(positions: Tensor, channels: int) -> Tensor:
    frequencies = 1.0 / torch.pow(THETA, torch.arange(0, channels, 2, dtype=torch.float64) / channels)
    angles = torch.outer(positions.double(), frequencies)
    return torch.polar(torch.ones_like(angles), angles)
