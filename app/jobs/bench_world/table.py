"""From seconds by name to the rows that are read: medians, and the aims they are held against."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from app.jobs.bench_world.lengths import AFTER, PARKED, STEADY


@dataclass(frozen=True)
class Row:
    """One line.  Seconds, or a ratio."""

    name: str
    value: float
    aim: float | None = None
    at_least: bool = False
    """Whether the aim is a lower bound."""

    @property
    def reached(self) -> bool | None:
        """None without an aim."""
        return None if self.aim is None else (self.value >= self.aim if self.at_least else self.value <= self.aim)


def rows(here: Mapping[str, Sequence[float]]) -> list[Row]:
    """here: `Measured.seconds`."""
    last = PARKED + AFTER - 1 - STEADY  # of "generate" and "decode", which leave chunk 0 out
    opening = ["open: prompt", "open: image", "open: chunk", "open: frames"]
    first = sum(here[name][0] for name in opening)
    cold = first + sum(here["generate"][: PARKED - 1]) + sum(here["decode"][: PARKED - 1])
    hit = here["full hit, frames"][0]
    journal = median(here["resume, journal"])
    return [
        *(Row(name, here[name][0]) for name in opening),
        Row("first chunk of a session that is open", here["open: chunk"][0] + here["open: frames"][0], 1.5),
        Row("session opened, and its first chunk", first, 1.5),
        Row("cold chunk, window full", median(here["generate"][last:])),
        Row("decode a chunk", median(here["decode"][last:])),
        Row("steady period, decode overlapped on one device", median(here["period"]), 0.65),
        Row("clean-pass replay of a chunk", journal / PARKED),
        Row(f"resume of {PARKED} parked chunks, keys and values kept", median(here["resume, kept"]), 0.3),
        Row(f"resume of {PARKED} parked chunks, from the journal", journal, 1.3),
        Row("decoder's state rebuilt from the journal", here["decoder warmed"][0]),
        Row("journal entry stored", median(here["journal stored"])),
        Row("frames of a chunk from the cache", median(here["frames fetched"])),
        Row(f"{PARKED} chunks cold, decoded one after another", cold),
        Row(f"{PARKED} chunks found, decoded", here["full hit, decoded"][0]),
        Row(f"{PARKED} chunks found, frames from the cache", hit),
        Row("full hit: times faster than cold", cold / hit, 10, at_least=True),
    ]


def format_rows(table: Sequence[Row]) -> str:
    """A line a row."""
    width = max(len(row.name) for row in table)
    lines = []
    for row in table:
        aim = ""
        if row.aim is not None:
            aim = f"  aim {'>=' if row.at_least else '<='} {row.aim:g}  {'reached' if row.reached else 'MISSED'}"
        lines.append(f"{row.name:<{width}}  {row.value:9.3f}{aim}")
    return "\n".join(lines)
