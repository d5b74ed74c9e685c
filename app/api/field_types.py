"""Kinds of fields that requests share, for pydantic's validators."""

from __future__ import annotations

import re
from typing import NamedTuple

SIZE_PATTERN = r"^[1-9][0-9]{0,4}x[1-9][0-9]{0,4}$"


class Size(NamedTuple):
    """Pixels."""

    width: int
    height: int


def size_text(value: object) -> Size | None:
    """``WIDTHxHEIGHT`` as a `Size`; None stays None.  Raises ValueError with the nearest valid sizes."""
    if value is None:
        return None
    if not isinstance(value, str) or not re.fullmatch(SIZE_PATTERN, value, re.ASCII):
        raise ValueError('expected a string "WIDTHxHEIGHT" in pixels, such as "832x480"')
    size = Size(*map(int, value.split("x")))
    if size.width % 16 or size.height % 16:
        below, above = (Size(*(max(16, (side + up) // 16 * 16) for side in size)) for up in (0, 15))
        raise ValueError(
            f"expected width and height to be multiples of 16; "
            f"nearest valid: {below.width}x{below.height} and {above.width}x{above.height}"
        )
    return size


def words(value: str) -> str:
    """Text that every file and database can hold.  Raises ValueError."""
    if "\x00" in value:
        raise ValueError("expected text without NUL characters")
    if any("\ud800" <= char <= "\udfff" for char in value):  # json.loads lets them through; no UTF-8 file can hold them
        raise ValueError("expected text without lone surrogates")
    return value


def not_blank(value: str) -> str:
    """Text that shows something.  Raises ValueError."""
    if not value.strip():
        raise ValueError("expected at least one visible character")
    return value
