from __future__ import annotations

from app.jobs.train_shapes.pace import MEASURE_TO, SPARE, Pace


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_planned_steps_are_counted():
    pace = Pace(3)
    steps = []
    while pace.goes_on():
        steps.append(pace.step)
    assert steps == [0, 1, 2]


def test_seconds_become_the_steps_that_fit():
    clock = Clock()
    pace = Pace(10**6, seconds=200.0, clock=clock)
    while pace.goes_on():
        clock.now += 0.5
    # Step 60 begins at 30 s; nine tenths of the other 170 s hold 306 steps of half a second.
    assert pace.steps == MEASURE_TO + int(SPARE * 170 / 0.5)
    assert clock.now <= 200


def test_a_resumed_stage_keeps_its_plan():
    pace = Pace(100, seconds=5.0)
    pace.resume(done=7, steps=9)
    assert pace.goes_on()
    assert pace.step == 7
    assert pace.goes_on()
    assert not pace.goes_on()
