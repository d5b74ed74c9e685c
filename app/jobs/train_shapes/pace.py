"""How long a stage trains, when it reports and when it saves.

The number of steps is part of the recipe: the learning rate falls towards it. `seconds` finds it instead: after a few
steps the pace is measured and the number of steps that fits is fixed and printed, so that the run can be repeated
with `--steps`.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

MEASURE_FROM, MEASURE_TO = 20, 60  # steps; before the first, kernels are still being chosen
SPARE = 0.9  # steps were seen to slow down from 67 to 75 ms in the first minute


class Pace:
    """Counts the steps of one stage; `step` is the one in progress, from 0."""

    def __init__(
        self,
        steps: int,
        seconds: float | None = None,
        report_s: float = 10.0,
        save_s: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ):
        """steps: planned; seconds: wall clock from now that replaces the plan; report_s, save_s: between reports,
        saves."""
        self._clock = clock
        self.steps, self.seconds, self.step = steps, seconds, -1
        self.started = self._reported = self._saved = clock()
        self._last, self.seconds_a_step = self.started, 0.0
        self._report_s, self._save_s = report_s, save_s
        self._measured_from = 0.0

    def resume(self, done: int, steps: int) -> None:
        """`done` steps of a plan of `steps` lie behind; the plan is kept."""
        self.step, self.steps, self.seconds = done - 1, steps, None

    def goes_on(self) -> bool:
        """Moves on to the next step; False when the plan is done."""
        now = self._clock()
        self.step += 1
        self.seconds_a_step = (
            0.95 * self.seconds_a_step + 0.05 * (now - self._last) if self.step > MEASURE_FROM else now - self._last
        )
        self._last = now
        if self.seconds is not None and self.step in (MEASURE_FROM, MEASURE_TO):
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            now = self._clock()
            if self.step == MEASURE_FROM:
                self._measured_from = now
            else:
                each = (now - self._measured_from) / (MEASURE_TO - MEASURE_FROM)
                self.steps = max(self.step + 1, self.step + int(SPARE * (self.seconds - (now - self.started)) / each))
                print(f"pace: {each * 1e3:.1f} ms a step; {self.seconds:.0f} s hold --steps {self.steps}", flush=True)
        return self.step < self.steps

    def reports(self) -> bool:
        """True once every `report_s` seconds, and at the first and last step."""
        now = self._clock()
        due = now - self._reported >= self._report_s or self.step in (0, self.steps - 1)
        self._reported = now if due else self._reported
        return due

    def saves(self) -> bool:
        """True once every `save_s` seconds."""
        now = self._clock()
        due = now - self._saved >= self._save_s
        self._saved = now if due else self._saved
        return due
