"""What a clip of the shapes world shows: one or two shapes that move before a background.

A `Scene` holds attributes only; where things stand is decided by `layout`. A field that is `None` is unstated: a
caption does not speak of it and the reader does not judge it. Imports nothing heavy.
"""

from __future__ import annotations

import random
import zlib
from dataclasses import dataclass, replace

# RGB in [0, 1]. Kept apart from each other and from every background by more than the autoencoder's error.
COLOURS: dict[str, tuple[float, float, float]] = {
    "red": (0.86, 0.10, 0.12),
    "orange": (0.96, 0.52, 0.06),
    "yellow": (0.95, 0.90, 0.16),
    "green": (0.12, 0.72, 0.20),
    "cyan": (0.14, 0.82, 0.86),
    "blue": (0.14, 0.24, 0.92),
    "purple": (0.60, 0.16, 0.78),
    "white": (0.95, 0.95, 0.95),
}
BACKGROUNDS: dict[str, tuple[float, float, float]] = {
    "black": (0.04, 0.04, 0.04),
    "gray": (0.45, 0.45, 0.45),
    "navy": (0.05, 0.08, 0.28),
    "brown": (0.34, 0.21, 0.10),
    "teal": (0.04, 0.34, 0.34),
}
KINDS = ("circle", "square", "triangle", "ring", "star", "cross")
DIRECTIONS = ("left", "right", "up", "down", "still")
SIZES = ("small", "large")
SPEEDS = ("slow", "fast")
TEXTURES = ("plain", "gradient", "stripes")
PANS = ("none", "left", "right")  # the way the camera turns: the stripes run the other way
OPPOSITE_DIRECTION = {"left": "right", "right": "left", "up": "down", "down": "up"}


def _check(owner: str, name: str, value: str | None, allowed: tuple[str, ...]) -> None:
    if value is not None and value not in allowed:
        raise ValueError(
            f"{owner}.{name}: got {value!r}, allowed are {', '.join(allowed)} or None (unstated); choose one of these"
        )


def stated(value: str | None, name: str) -> str:
    """`value`, which the caller must draw or say; raises when it is unstated."""
    if value is None:
        raise ValueError(f"{name}: got None (unstated), but it must be drawn or said; state it in the scene")
    return value


@dataclass(frozen=True)
class Shape:
    """One moving shape. `speed` is None for a shape that is still."""

    colour: str | None
    kind: str | None
    direction: str | None
    size: str | None = None
    speed: str | None = None

    def __post_init__(self) -> None:
        _check("Shape", "colour", self.colour, tuple(COLOURS))
        _check("Shape", "kind", self.kind, KINDS)
        _check("Shape", "direction", self.direction, DIRECTIONS)
        _check("Shape", "size", self.size, SIZES)
        _check("Shape", "speed", self.speed, SPEEDS)
        if self.direction == "still" and self.speed is not None:
            raise ValueError(
                f"Shape.speed: got {self.speed!r} for a shape that is still, allowed is None; drop the speed or name "
                f"a direction"
            )


@dataclass(frozen=True)
class Scene:
    """One or two shapes (of different colours) and the background behind them. A camera pan needs stripes: on a plain
    ground it could not be seen."""

    shapes: tuple[Shape, ...]
    background: str | None
    texture: str | None = "plain"
    pan: str | None = "none"

    def __post_init__(self) -> None:
        if not 1 <= len(self.shapes) <= 2:
            raise ValueError(f"Scene.shapes: got {len(self.shapes)} shapes, allowed are 1 or 2; drop or add a shape")
        if len(self.shapes) == 2 and self.shapes[0].colour == self.shapes[1].colour:
            raise ValueError(
                f"Scene.shapes: both are {self.shapes[0].colour!r}, allowed are two colours; change one, so that "
                f"each can be told from the other"
            )
        _check("Scene", "background", self.background, tuple(BACKGROUNDS))
        _check("Scene", "texture", self.texture, TEXTURES)
        _check("Scene", "pan", self.pan, PANS)
        if self.pan in ("left", "right") and self.texture != "stripes":
            raise ValueError(
                f"Scene.pan: got {self.pan!r} on texture {self.texture!r}, allowed on 'stripes' alone; set texture "
                f"to 'stripes' or pan to 'none'"
            )


def is_held_out(shape: Shape) -> bool:
    """True for the about one in twelve of the 240 (colour, kind, direction) triples that no training clip shows."""
    return zlib.crc32(f"{shape.colour} {shape.kind} {shape.direction}".encode()) % 10 == 0


def draw_shape(rng: random.Random) -> Shape:
    """A fully stated shape, uniform over colour, kind, direction, size and (when it moves) speed."""
    direction = rng.choice(DIRECTIONS)
    return Shape(
        colour=rng.choice(tuple(COLOURS)),
        kind=rng.choice(KINDS),
        direction=direction,
        size=rng.choice(SIZES),
        speed=None if direction == "still" else rng.choice(SPEEDS),
    )


def draw_scene(rng: random.Random, held_out: bool = False) -> Scene:
    """A fully stated scene, 60 % with one shape and 40 % with two.

    With `held_out` at least one shape is of a held-out triple; without it none is, so the two sets share no scene.
    """
    count = 1 if rng.random() < 0.6 else 2
    while True:
        shapes = tuple(draw_shape(rng) for _ in range(count))
        if len({shape.colour for shape in shapes}) == count and any(map(is_held_out, shapes)) == held_out:
            break
    texture = rng.choice(TEXTURES)
    pan = rng.choice(("none", "none", "left", "right")) if texture == "stripes" else "none"
    return Scene(shapes=shapes, background=rng.choice(tuple(BACKGROUNDS)), texture=texture, pan=pan)


def unstate(scene: Scene, rng: random.Random) -> Scene:
    """`scene` with some attributes left open, as a person would: size and speed in 40 %, the whole background in 10
    %."""
    shapes = tuple(
        replace(
            shape, size=shape.size if rng.random() < 0.6 else None, speed=shape.speed if rng.random() < 0.6 else None
        )
        for shape in scene.shapes
    )
    if rng.random() < 0.1:
        return Scene(shapes=shapes, background=None, texture=None, pan=None)
    return replace(scene, shapes=shapes)


def opposites(scene: Scene, rng: random.Random) -> dict[str, Scene]:
    """Scenes that differ from `scene` in exactly one attribute, by its name: colour, kind, direction (of the first
    shape) and background.

    A moving shape turns round, a still one starts to move. A cache that takes any of these for `scene` is wrong.
    """
    first, rest = scene.shapes[0], scene.shapes[1:]

    def with_first(**changes: str | None) -> Scene:
        return replace(scene, shapes=(replace(first, **changes), *rest))

    taken = {shape.colour for shape in scene.shapes}
    direction = OPPOSITE_DIRECTION.get(stated(first.direction, "direction")) or rng.choice(DIRECTIONS[:4])
    found = {
        "colour": with_first(colour=rng.choice([colour for colour in COLOURS if colour not in taken])),
        "kind": with_first(kind=rng.choice([kind for kind in KINDS if kind != first.kind])),
        "direction": with_first(direction=direction),
    }
    if scene.background is not None:
        found["background"] = replace(
            scene, background=rng.choice([name for name in BACKGROUNDS if name != scene.background])
        )
    return found
