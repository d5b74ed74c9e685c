"""Alternating runs of several contestants, and what comes of them: medians, spreads, ratios, equality of latents."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch

from app.jobs.bench.bench_request import BenchRequest
from app.jobs.bench.contestants import PHASES, Contestant, Timed

WARM_UP_STEPS = 3
"""Enough for every kernel of a second-order solver."""


@dataclass(frozen=True)
class Spread:
    """Seconds over the runs."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of at least one value."""
        return cls(median(values), min(values), max(values))


@dataclass(frozen=True)
class Row:
    """One contestant at one shape."""

    name: str
    total: Spread
    phases: dict[str, Spread]
    ratio: float
    """Median total over the first contestant's."""
    denoise_ratio: float
    latents_difference: float
    """Largest absolute difference of its latents to the first contestant's; 0 means equal bits."""
    repeatable: bool
    """All its runs gave the same bits."""


def run_order(contestants: int, repeats: int) -> list[int]:
    """A B B A for two contestants and one repeat: drifts of the machine hit all alike.  Each runs 2 * repeats times."""
    once = list(range(contestants))
    return (once + once[::-1]) * repeats


def compare(
    contestants: Sequence[Contestant], request: BenchRequest, repeats: int, tell: Callable[[str], None]
) -> list[Row]:
    """Warm every contestant up, run them in turn, compare with the first.  tell: hears of every run."""
    warm_up = replace(request, steps=min(request.steps, WARM_UP_STEPS))
    for contestant in contestants:
        tell(f"{request.shape} warm-up  {contestant.run(warm_up).total:8.3f} s  {contestant.name}")
    runs: list[list[Timed]] = [[] for _ in contestants]
    for index in run_order(len(contestants), repeats):
        runs[index].append(contestants[index].run(request))
        tell(f"{request.shape} run      {runs[index][-1].total:8.3f} s  {contestants[index].name}")
    return [_row(contestant.name, own, runs[0]) for contestant, own in zip(contestants, runs, strict=True)]


def _row(name: str, runs: Sequence[Timed], base: Sequence[Timed]) -> Row:
    total = Spread.of([run.total for run in runs])
    phases = {phase: Spread.of([run.phases[phase] for run in runs]) for phase in PHASES}
    return Row(
        name=name,
        total=total,
        phases=phases,
        ratio=total.median / median(run.total for run in base),
        denoise_ratio=phases["denoise"].median / median(run.phases["denoise"] for run in base),
        latents_difference=float((runs[0].latents - base[0].latents).abs().max()),
        repeatable=all(torch.equal(run.latents, runs[0].latents) for run in runs),
    )


def format_rows(request: BenchRequest, rows: Sequence[Row]) -> str:
    """A table: medians in seconds, the spread of the total, ratios to the first row."""
    head = f"{request.shape}, {request.steps} steps, guidance {request.guidance_scale:g}: medians in seconds"
    columns = f"{'':28}{'total':>9} {'(least, most)':>18}" + "".join(f"{phase:>10}" for phase in PHASES)
    lines = [head, columns + f"{'ratio':>8}{'denoise':>9}{'latents':>10}"]
    for row in rows:
        spread = f"({row.total.least:.3f}, {row.total.most:.3f})"
        phases = "".join(f"{row.phases[phase].median:10.3f}" for phase in PHASES)
        equal = "equal" if row.latents_difference == 0 else f"{row.latents_difference:.1e}"
        lines.append(
            f"{row.name:28}{row.total.median:9.3f} {spread:>18}{phases}"
            f"{row.ratio:8.3f}{row.denoise_ratio:9.3f}{equal if row.repeatable else equal + '!':>10}"
        )
    if not all(row.repeatable for row in rows):
        lines.append("! its own runs differ from each other")
    return "\n".join(lines)


def as_json(request: BenchRequest, rows: Sequence[Row]) -> dict[str, Any]:
    """Plain data of one shape."""

    def spread(value: Spread) -> dict[str, float]:
        return {"median_s": value.median, "least_s": value.least, "most_s": value.most}

    return {
        "shape": str(request.shape),
        "steps": request.steps,
        "guidance_scale": request.guidance_scale,
        "contestants": [
            {
                "name": row.name,
                "total": spread(row.total),
                "phases": {name: spread(value) for name, value in row.phases.items()},
                "ratio": row.ratio,
                "denoise_ratio": row.denoise_ratio,
                "latents_difference": row.latents_difference,
                "repeatable": row.repeatable,
            }
            for row in rows
        ],
    }
