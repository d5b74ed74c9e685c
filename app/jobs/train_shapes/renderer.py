"""Draws layouts: signed distances with soft edges, all clips of a batch at once.

Axes: N clips, C = 3 channels, T frames, H = W = 128. Pixels are float32 in [-1, 1], as the autoencoder takes them.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from app.jobs.train_shapes.layout import FRAMES, SIDE, Layout

EDGE_PX = 2.5  # a soft edge is kinder to an 8x8 autoencoder than a hard one
STRIPE_PX = 32.0


def signed_distance(kind: Tensor, x: Tensor, y: Tensor, r: Tensor) -> Tensor:
    """Signed distance in px to the outline, negative inside. kind, r: [N, 1, 1, 1]; x: [N, T, 1, W];
    y: [N, T, H, 1]."""
    rho = torch.sqrt(x * x + y * y + 1e-6)
    ax, ay = x.abs(), y.abs()
    circle = rho - r
    square = torch.maximum(ax, ay) - 0.86 * r
    triangle = torch.maximum(y, 0.8660254 * ax - 0.5 * y) - 0.575 * r
    ring = (rho - 0.75 * r).abs() - 0.25 * r
    # The star is folded into one half tip; its edge runs from the tip (1.15 r, 0) to the notch at half that, 36
    # degrees on.
    wedge = math.pi / 5
    angle = (torch.remainder(torch.atan2(x, -y) + wedge, 2 * wedge) - wedge).abs()
    notch_x, notch_y = 0.5 * math.cos(wedge), 0.5 * math.sin(wedge)
    length = math.hypot(notch_y, 1 - notch_x)
    star = ((rho * torch.cos(angle) - 1.15 * r) * notch_y + rho * torch.sin(angle) * (1 - notch_x)) / length
    cross = torch.minimum(torch.maximum(ax - r, ay - 0.36 * r), torch.maximum(ay - r, ax - 0.36 * r))
    out = circle
    for index, distance in enumerate((square, triangle, ring, star, cross), start=1):
        out = torch.where(kind == index, distance, out)
    return out


def draw(
    kind: Tensor,
    rgb: Tensor,
    radius: Tensor,
    centre: Tensor,
    ground: Tensor,
    texture: Tensor,
    phase: Tensor,
    pan: Tensor,
) -> Tensor:
    """The fields of a `Layout` as tensors -> [N, 3, T, H, W] float32 in [-1, 1]. Compiles into one kernel."""
    line = torch.arange(SIDE, device=rgb.device, dtype=torch.float32) + 0.5
    frame = torch.arange(FRAMES, device=rgb.device, dtype=torch.float32)
    shift = phase[:, None] + pan[:, None] * frame  # [N, T]
    stripes = torch.sin((line - shift[..., None]) * (2 * math.pi / STRIPE_PX))  # [N, T, W]
    slope = (line / SIDE * 2 - 1).expand_as(stripes)
    tone = torch.where(
        texture[:, None, None] == 1, slope, torch.where(texture[:, None, None] == 2, stripes, torch.zeros_like(stripes))
    )
    swing = 0.3 * ground + 0.04
    image = (
        ground[:, :, None, None, None] + swing[:, :, None, None, None] * tone[:, None, :, None, :]
    )  # [N, 3, T, 1, W]
    for s in range(2):
        x = line[None, None, None, :] - centre[:, s, :, 0, None, None]
        y = line[None, None, :, None] - centre[:, s, :, 1, None, None]
        r = radius[:, s, None, None, None]
        ramp = (0.5 - signed_distance(kind[:, s, None, None, None], x, y, r) / EDGE_PX).clamp(0, 1)
        cover = (ramp * ramp * (3 - 2 * ramp) * (r > 0))[:, None]  # [N, 1, T, H, W]
        image = image + cover * (rgb[:, s, :, None, None, None] - image)
    return image.clamp(0, 1) * 2 - 1


def render(layout: Layout, device: torch.device | str = "cpu", drawing: Callable[..., Tensor] = draw) -> Tensor:
    """`layout` -> [N, 3, T, H, W] float32 in [-1, 1] on `device`; `drawing` may be a compiled `draw`."""
    return drawing(
        **{name: torch.from_numpy(value).to(device, non_blocking=True) for name, value in vars(layout).items()}
    )
