"""How far a job is and when its file can be expected, from the times its model has shown.

Times of a shape that was never run are scaled from the nearest known one: steps with tokens and branches, decoding with
pixels.  Attention grows faster than that, so a first guess for a larger shape is low; after the first step of a job its own
times are used.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from app.driver.job_state import JobState, VideoParams

SMOOTHING = 0.5
"""Weight of the newest observation: load changes from request to request, and an old average would hide it."""


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
        old = self._known.get(shape, seen)
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


@dataclass
class Progress:
    """One attempt's way through its phases."""

    expected: Expectation | None
    steps: int
    phase_began: float = field(default_factory=time.monotonic)
    state: JobState = JobState.QUEUED
    step: int = 0
    first_step: int = 0
    """Where this attempt began; earlier steps came from a saved state."""
    _percent: int = 0

    def enter(self, state: JobState) -> None:
        """A phase begins."""
        self.state, self.phase_began = state, time.monotonic()

    def _step_s(self) -> float | None:
        own = self.step - self.first_step
        if self.state is JobState.DENOISING and own > 0:
            return (time.monotonic() - self.phase_began) / own
        return self.expected.step if self.expected else None

    def _remaining(self, step_s: float, expected: Expectation) -> float:
        elapsed = time.monotonic() - self.phase_began
        match self.state:
            case JobState.QUEUED:
                return expected.encode + self.steps * step_s + expected.decode
            case JobState.ENCODING:
                return max(0.0, expected.encode - elapsed) + (self.steps - self.step) * step_s + expected.decode
            case JobState.DENOISING:
                return (self.steps - self.step) * step_s + expected.decode
            case _:
                return max(0.0, expected.decode - elapsed)

    def eta_s(self) -> float | None:
        """Seconds to the file, waiting in the queue not counted; None while nothing is known."""
        step_s = self._step_s()
        if step_s is None:
            return None
        # A model that has shown nothing but steps: encoding is behind it, decoding usually takes a few steps' time.
        return self._remaining(step_s, self.expected or Expectation(0.0, step_s, 3 * step_s))

    def percent(self) -> int:
        """0 to 99, never falling within an attempt; 100 belongs to a job whose file can be downloaded."""
        step_s = self._step_s()
        if step_s is not None and self.state is not JobState.QUEUED:
            expected = self.expected or Expectation(0.0, step_s, 3 * step_s)
            total = expected.encode + self.steps * step_s + expected.decode
            done = 1 - self._remaining(step_s, expected) / total if total > 0 else 0.0
            self._percent = max(self._percent, min(99, int(100 * done)))
        return self._percent
