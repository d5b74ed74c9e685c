"""Progress and expected time, on a clock the test moves."""

from __future__ import annotations

import pytest

from app.driver import progress
from app.driver.job_state import JobState, VideoParams
from app.driver.progress import Expectation, Pace, Progress


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def params(pixels: int = 16, frames: int = 5, guidance: float = 5.0) -> VideoParams:
    return VideoParams(
        model="m",
        prompt="",
        negative_prompt="",
        width=pixels,
        height=16,
        num_frames=frames,
        fps=8,
        num_inference_steps=10,
        guidance_scale=guidance,
        guidance_scale_2=None,
        flow_shift=1.0,
        seed=0,
        max_sequence_length=8,
    )


SEEN = Expectation(encode=1.0, step=2.0, decode=4.0)


def test_a_job_by_hand():
    """1 s to encode, ten steps of 2 s, 4 s to decode: 25 s."""
    clock = Clock()
    job = Progress(SEEN, 10, now=clock)
    assert (job.percent(), job.eta_s()) == (0, 25.0)
    job.enter(JobState.ENCODING)
    clock.now += 0.5
    assert (job.percent(), job.eta_s()) == (2, 24.5)
    clock.now += 0.5
    job.enter(JobState.DENOISING)
    assert job.eta_s() == 24.0
    for step in range(1, 11):
        clock.now += 2.0
        job.advance(step)
        assert job.eta_s() == 24.0 - 2 * step
        assert job.percent() == (1 + 2 * step) * 4  # of 25 s
    job.enter(JobState.DECODING)
    clock.now += 3.0
    assert (job.percent(), job.eta_s()) == (96, 1.0)
    clock.now += 30.0  # takes longer than ever before
    assert (job.percent(), job.eta_s()) == (99, 0.0)


def test_after_a_fifth_its_own_pace_counts():
    """Steps take 6 s instead of the 2 s seen: after two of ten, 8 * 6 + 4 s are left, whatever was expected."""
    clock = Clock()
    job = Progress(SEEN, 10, now=clock)
    job.enter(JobState.DENOISING)
    for step in (1, 2):
        clock.now += 6.0
        job.advance(step)
    assert job.eta_s() == 52.0


def test_between_two_steps_the_time_runs_down_and_never_up():
    clock = Clock()
    job = Progress(SEEN, 10, now=clock)
    job.enter(JobState.DENOISING)
    clock.now += 2.0
    job.advance(1)
    etas = []
    for _ in range(6):
        etas.append(job.eta_s())
        clock.now += 0.5
    assert etas == [22.0, 21.5, 21.0, 20.5, 20.0, 20.0]  # the step under way counts at most as one


def test_nothing_is_known_before_the_first_step_of_a_new_model():
    clock = Clock()
    job = Progress(None, 10, now=clock)
    job.enter(JobState.ENCODING)
    assert (job.percent(), job.eta_s()) == (0, None)
    job.enter(JobState.DENOISING)
    clock.now += 2.0
    job.advance(1)
    assert job.eta_s() == 9 * 2.0 + 3 * 2.0  # decoding is guessed as three steps


def test_a_resumed_attempt_measures_only_its_own_steps():
    clock = Clock()
    job = Progress(SEEN, 10, first_step=6, now=clock)
    job.enter(JobState.ENCODING)
    assert job.step == 6
    assert job.percent() >= 48  # 12 of 25 s are behind it
    job.enter(JobState.DENOISING)
    clock.now += 3.0
    job.advance(7)
    assert job.eta_s() == 3 * 3.0 + 4.0


def test_percent_never_falls():
    clock = Clock()
    job = Progress(SEEN, 10, now=clock)
    job.enter(JobState.DENOISING)
    clock.now += 0.1
    job.advance(1)  # far faster than expected ...
    seen = [job.percent()]
    for step in range(2, 11):
        clock.now += 9.0  # ... then far slower
        job.advance(step)
        seen.append(job.percent())
    assert seen == sorted(seen)
    assert seen[-1] <= 99


def test_pace_follows_the_latest_jobs():
    pace = Pace()
    assert pace.expect(params()) is None
    pace.observe(params(), SEEN)
    pace.observe(params(), Expectation(3.0, 4.0, 8.0))
    assert pace.expect(params()) == Expectation(2.0, 3.0, 6.0)  # half old, half new


def test_an_unknown_shape_is_scaled_from_the_nearest():
    pace = Pace()
    pace.observe(params(pixels=16), SEEN)
    pace.observe(params(pixels=160), Expectation(1.0, 50.0, 100.0))
    assert pace.expect(params(pixels=32)) == Expectation(1.0, 4.0, 8.0)
    assert pace.expect(params(pixels=320)) == Expectation(1.0, 100.0, 200.0)
    assert pace.expect(params(pixels=16, guidance=1.0)) == Expectation(1.0, 1.0, 4.0)  # one branch: half a step


def test_shapes_are_forgotten_oldest_first(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(progress, "SHAPES", 2)
    pace = Pace()
    for frames, step in ((5, 1.0), (9, 2.0), (5, 1.0), (13, 3.0)):
        pace.observe(params(frames=frames), Expectation(0.0, step, 0.0))
    assert len(pace._known) == 2
    kept = pace.expect(params(frames=5))
    assert kept is not None
    assert kept.step == 1.0
    scaled = pace.expect(params(frames=9))  # the oldest: now a guess from the 5 or 13 frames
    assert scaled is not None
    assert scaled.step != 2.0
