"""How far a job is and when its file can be expected, from the times its model has shown.

Times of a shape that was never run are scaled from the nearest known one: steps with tokens and branches, decoding
with pixels.  Attention grows faster than that, so a first guess for a larger shape is low; after the first step of a
job its own times are used.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from app.driver.job_state import JobState, VideoParams

SMOOTHING = 0.5
"""Weight of the newest observation: load changes from request to request, and an old average would hide it."""
SHAPES = 256
"""Shapes remembered, the latest: callers choose them, and must not fill the memory."""


@dataclass(frozen=True)
class Expectation:
    """Seconds of one job's phases; `step` is one step, `decode` includes writing the files."""

    encode: float
    step: float
    decode: float


@dataclass(frozen=True)
class _Shape:
    pixels: int
    """width * height * num_frames."""
    branches: int


def _shape(params: VideoParams) -> _Shape:
    return _Shape(params.width * params.height * params.num_frames, 2 if params.guidance_scale > 1 else 1)


def _smooth(old: float, new: float) -> float:
    return (1 - SMOOTHING) * old + SMOOTHING * new


class Pace:
    """What one model has taken so far."""

    def __init__(self) -> None:
        self._known: dict[_Shape, Expectation] = {}

    def observe(self, params: VideoParams, seen: Expectation) -> None:
        """Learn from a finished job of these parameters."""
        shape = _shape(params)
        old = self._known.pop(shape, seen)
        while len(self._known) >= SHAPES:
            del self._known[next(iter(self._known))]
        self._known[shape] = Expectation(
            encode=_smooth(old.encode, seen.encode),
            step=_smooth(old.step, seen.step),
            decode=_smooth(old.decode, seen.decode),
        )

    def expect(self, params: VideoParams) -> Expectation | None:
        """None until the model has finished anything, a warm-up included."""
        shape = _shape(params)
        if shape in self._known:
            return self._known[shape]
        if not self._known:
            return None
        nearest = min(self._known, key=lambda s: abs(s.pixels - shape.pixels))
        known, ratio = self._known[nearest], shape.pixels / nearest.pixels
        return Expectation(known.encode, known.step * ratio * shape.branches / nearest.branches, known.decode * ratio)


class Progress:
    """One attempt's way through its phases.

    first_step: where this attempt begins; earlier steps came from a saved state.  now: seconds on any steady clock.
    """

    def __init__(
        self,
        expected: Expectation | None,
        steps: int,
        first_step: int = 0,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._expected, self._steps, self._first_step, self._now = expected, steps, first_step, now
        self._state = JobState.QUEUED
        self.step = first_step
        """Solver steps done."""
        self._phase_began = self._step_ended = now()
        self._percent = 0

    def enter(self, state: JobState) -> None:
        """A phase begins."""
        self._state = state
        self._phase_began = self._step_ended = self._now()

    def advance(self, step: int) -> None:
        """So many of the solver's steps are done, those before a resume included."""
        self.step, self._step_ended = step, self._now()

    def eta_s(self) -> float | None:
        """Seconds to the file, waiting in the queue not counted; None while nothing is known."""
        expected = self._expectation()
        return None if expected is None else self._remaining(expected)

    def percent(self) -> int:
        """0 to 99, never falling within an attempt; 100 belongs to a job whose file can be downloaded."""
        expected = self._expectation()
        if expected is not None and self._state is not JobState.QUEUED:
            total = expected.encode + self._steps * expected.step + expected.decode
            done = 1 - self._remaining(expected) / total if total > 0 else 0.0
            self._percent = max(self._percent, min(99, int(100 * done + 1e-9)))
        return self._percent

    def _expectation(self) -> Expectation | None:
        """What the model has shown, with this attempt's own pace once it has any."""
        own = self.step - self._first_step
        if self._state is JobState.DENOISING and own > 0:
            step = (self._step_ended - self._phase_began) / own
            if self._expected is None:
                # A model that has shown nothing but steps: decoding usually takes a few steps' time.
                return Expectation(0.0, step, 3 * step)
            return replace(self._expected, step=step)
        return self._expected

    def _remaining(self, expected: Expectation) -> float:
        steps = (self._steps - self.step) * expected.step
        elapsed = self._now() - self._phase_began
        match self._state:
            case JobState.QUEUED:
                return expected.encode + steps + expected.decode
            case JobState.ENCODING:
                return max(0.0, expected.encode - elapsed) + steps + expected.decode
            case JobState.DENOISING:
                # The step under way has had some of its time; one that takes longer than expected is about to end.
                under_way = min(self._now() - self._step_ended, expected.step) if steps else 0.0
                return steps - under_way + expected.decode
            case _:
                return max(0.0, expected.decode - elapsed)
