"""Reads a scene back from frames: colours, shapes, directions, sizes, speeds, background, texture and pan, by plain
image analysis.

The rows at the top and the bottom edge show the background (shapes keep three pixels away from the edge). What
differs from it is labelled with the nearest shape colour; the area's centre tells the motion, and its overlap with
each kind's outline of the same area tells the kind.
Axes: T frames, H = W = 128, y points down. Frames are float in [0, 1].
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import torch

from app.jobs.train_shapes.layout import PAN_PX, RADIUS, SIDE, TRAVEL
from app.jobs.train_shapes.renderer import STRIPE_PX, signed_distance
from app.jobs.train_shapes.scene import BACKGROUNDS, COLOURS, KINDS, Scene, Shape

EDGE_ROWS = 2
NEAR = 0.24  # RGB distance within which a pixel surely has a colour; the closest two (orange, yellow) are 0.39 apart
MIN_AREA = 40.0  # px; the smallest shape, a small star, has about 170
RIM_PX = 2  # the soft edge is 2.5 px wide
WINDOW_PX = 32  # an outline is compared this far to each side of its centre; the largest reaches 24
STILL_PX = 8.0  # slow shapes travel 18 or more
SLOPE_SHARE, STRIPE_SHARE = 0.4, 0.4  # of the tone swing that the renderer uses


@dataclass(frozen=True)
class Reading:
    """What was found. `colour_drift` is the largest change of a shape's mean colour from the first to the last frame,
    relative to its length."""

    scene: Scene | None  # None when no shape, more than two, or no motion could be read
    colour_drift: float


def read(frames: np.ndarray) -> Reading:
    """[T, H, W, 3] float in [0, 1] -> what they show."""
    frames = np.asarray(frames, np.float32)
    if frames.ndim != 4 or frames.shape[1:] != (SIDE, SIDE, 3):
        raise ValueError(
            f"frames: got shape {frames.shape}, expected (T, {SIDE}, {SIDE}, 3); generate at {SIDE} x {SIDE}"
        )
    edge = np.concatenate([frames[:, :EDGE_ROWS], frames[:, -EDGE_ROWS:]], axis=1)
    columns = np.median(edge, axis=1)  # [T, W, 3]
    background = min(BACKGROUNDS, key=lambda name: float(np.linalg.norm(columns.mean((0, 1)) - BACKGROUNDS[name])))
    texture, pan = _texture(columns.mean(-1), float(np.mean(BACKGROUNDS[background])))
    masks = _masks(frames, columns)
    shapes, drifts = [], []
    for colour, mask in masks.items():
        shape = _shape(colour, mask)
        if shape is not None:
            shapes.append(shape)
            drifts.append(_drift(frames, mask))
    if not 1 <= len(shapes) <= 2:
        return Reading(None, max(drifts, default=1.0))
    return Reading(Scene(tuple(shapes), background, texture, pan), max(drifts))


def _texture(tone: np.ndarray, ground: float) -> tuple[str, str]:
    """tone: [T, W] brightness of the background's columns; ground: brightness of its colour -> (texture, pan)."""
    swing = 0.3 * ground + 0.04
    line = (np.arange(SIDE) + 0.5) / SIDE * 2 - 1
    centred = tone - tone.mean(1, keepdims=True)
    slope = float((centred @ line).mean() / (line @ line))
    wave = (
        np.fft.fft(centred - slope * line, axis=1)[:, int(SIDE / STRIPE_PX)] * 2 / SIDE
    )  # [T] complex amplitude of the stripes
    if np.abs(wave).mean() > STRIPE_SHARE * swing:
        turn = np.angle((wave[1:] * wave[:-1].conj()).sum())  # a shift of d px turns the phase by -2 pi d / STRIPE_PX
        shift = -turn * STRIPE_PX / (2 * np.pi)
        if abs(shift) < abs(PAN_PX["left"]) / 2:
            return "stripes", "none"
        return "stripes", "left" if shift * PAN_PX["left"] > 0 else "right"
    return ("gradient" if slope > SLOPE_SHARE * swing else "plain"), "none"


def _masks(frames: np.ndarray, columns: np.ndarray) -> dict[str, np.ndarray]:
    """Colours that cover enough of the clip -> [T, H, W] bool, where a pixel is nearer to that colour than to
    background or other such colours."""
    palette = np.array(list(COLOURS.values()), np.float32)
    squared = (frames**2).sum(-1)[..., None] - 2 * frames @ palette.T + (palette**2).sum(-1)  # |a|^2 - 2ab + |b|^2
    to_colour = np.sqrt(np.maximum(squared, 0))  # [T, H, W, colours]
    to_ground = np.linalg.norm(frames - columns[:, None], axis=-1)
    surely = (
        (to_colour.argmin(-1)[..., None] == np.arange(len(palette)))
        & (to_colour < NEAR)
        & (to_ground > NEAR)[..., None]
    )
    areas = surely.sum((0, 1, 2)) / len(frames)
    present = [i for i in range(len(palette)) if areas[i] > MIN_AREA]
    if not present:
        return {}
    distances = np.concatenate([to_ground[..., None], to_colour[..., present]], axis=-1)
    labels = distances.argmin(-1)
    names = list(COLOURS)
    return {names[i]: (labels == k) & _grown(surely[..., i]) for k, i in enumerate(present, start=1)}


def _grown(mask: np.ndarray) -> np.ndarray:
    """`mask` [T, H, W] and all within RIM_PX steps: the rim of an orange shape on brown is nearest to red, and must
    not count for a red one."""
    grown = mask.copy()
    for _ in range(RIM_PX):
        last = grown.copy()
        grown[:, 1:] |= last[:, :-1]
        grown[:, :-1] |= last[:, 1:]
        grown[:, :, 1:] |= last[:, :, :-1]
        grown[:, :, :-1] |= last[:, :, 1:]
    return grown


def _shape(colour: str, mask: np.ndarray) -> Shape | None:
    """[T, H, W] bool -> the shape; None when it is missing from any frame."""
    area = mask.sum((1, 2)).astype(np.float64)
    if area.min() < MIN_AREA:
        return None
    place = np.arange(SIDE) + 0.5
    centre = np.stack([(mask.sum(1) @ place) / area, (mask.sum(2) @ place) / area], axis=1)  # [T, 2] (x, y)
    frames = len(mask)
    way = (centre[-3:].mean(0) - centre[:3].mean(0)) * (frames - 1) / (frames - 3)
    distance = float(np.abs(way).max())
    if distance < STILL_PX:
        direction = "still"
    elif abs(way[0]) > abs(way[1]):
        direction = "right" if way[0] > 0 else "left"
    else:
        direction = "down" if way[1] > 0 else "up"
    speed = None if direction == "still" else ("fast" if distance > (TRAVEL["slow"] + TRAVEL["fast"]) / 2 else "slow")
    kind, radius = _kind(mask[:: max(1, frames // 5)], centre[:: max(1, frames // 5)])
    return Shape(colour, kind, direction, "large" if radius > sum(RADIUS.values()) / 2 else "small", speed)


def _outline(kind: int, x: np.ndarray, y: np.ndarray, radius: float) -> np.ndarray:
    """bool [H, W]: inside the kind's outline of `radius` around (0, 0); x: [W], y: [H]."""
    at = (torch.tensor(kind), torch.from_numpy(x)[None, :], torch.from_numpy(y)[:, None], torch.tensor(float(radius)))
    return np.asarray(signed_distance(*at) < 0)


@cache
def _unit_outline(kind: int) -> tuple[float, np.ndarray]:
    """Area and centre of area [2] of the kind's outline of radius 1."""
    grid = np.arange(-1.5, 1.5, 0.02, dtype=np.float32) + 0.01
    inside = _outline(kind, grid, grid, 1.0)
    return float(inside.sum()) * 0.02**2, np.array([inside.sum(0) @ grid, inside.sum(1) @ grid]) / inside.sum()


def _kind(masks: np.ndarray, centres: np.ndarray) -> tuple[str, float]:
    """The kind whose outline of equal area and centre overlaps the masks [t, H, W] best, and its radius in px."""
    best = ("", 0.0, -1.0)
    place = (np.arange(SIDE) + 0.5).astype(np.float32)
    for index, name in enumerate(KINDS):
        area, middle = _unit_outline(index)
        radius = float(np.sqrt(masks.sum((1, 2)).mean() / area))
        overlap = []
        for mask, centre in zip(masks, (centres - middle * radius).astype(np.float32), strict=True):
            rows, columns = (slice(max(0, int(c) - WINDOW_PX), int(c) + WINDOW_PX) for c in (centre[1], centre[0]))
            outline = _outline(index, place[columns] - centre[0], place[rows] - centre[1], radius)
            both = (outline & mask[rows, columns]).sum()
            overlap.append(both / max(1, outline.sum() + mask.sum() - both))
        if np.mean(overlap) > best[2]:
            best = (name, radius, float(np.mean(overlap)))
    return best[0], best[1]


def _drift(frames: np.ndarray, mask: np.ndarray) -> float:
    """Change of the mean colour inside the shape from the first to the last frame, relative to the first (both RGB
    vectors)."""

    def inside(t: int) -> np.ndarray:
        core = mask[t].copy()
        for axis in (0, 1):  # two pixels of rim are left out: there the background shines through
            for shift in (-2, 2):
                core &= np.roll(mask[t], shift, axis)
        core = core if core.sum() >= 10 else mask[t]
        return frames[t][core].mean(0)

    first, last = inside(0), inside(len(frames) - 1)
    return float(np.linalg.norm(last - first) / np.linalg.norm(first))


def agrees(found: Scene | None, wanted: Scene) -> dict[str, bool]:
    """Which attributes of `wanted` were found; unstated ones are left out. Shapes are matched by colour."""
    by_colour = {shape.colour: shape for shape in found.shapes} if found else {}
    result = {"colour": set(by_colour) == {shape.colour for shape in wanted.shapes}}
    for name in ("kind", "direction", "size", "speed"):
        stated = [(shape.colour, getattr(shape, name)) for shape in wanted.shapes if getattr(shape, name) is not None]
        if stated:
            result[name] = all(
                colour in by_colour and getattr(by_colour[colour], name) == value for colour, value in stated
            )
    for name in ("background", "texture", "pan"):
        if getattr(wanted, name) is not None:
            result[name] = found is not None and getattr(found, name) == getattr(wanted, name)
    return result


REQUIRED = ("colour", "kind", "direction", "background")


def all_right(agreement: dict[str, bool]) -> bool:
    """True when colour, kind, direction and background all agree."""
    return all(agreement.get(name, True) for name in REQUIRED)
