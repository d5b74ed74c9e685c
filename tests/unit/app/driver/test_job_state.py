from __future__ import annotations

import itertools
import pickle

import pytest
from pydantic import ValidationError

from app.driver import job_state
from app.driver.job_state import FINAL, RUNNING, TRANSITIONS, IllegalTransition, Job, JobState, JobView, VideoParams

# Written out by hand, state by state, from the module's drawing.
LEGAL = {
    ("queued", "encoding"), ("queued", "completed"), ("queued", "failed"), ("queued", "cancelled"),
    ("encoding", "denoising"), ("encoding", "queued"), ("encoding", "failed"), ("encoding", "cancelled"),
    ("denoising", "decoding"), ("denoising", "queued"), ("denoising", "failed"), ("denoising", "cancelled"),
    ("decoding", "completed"), ("decoding", "queued"), ("decoding", "failed"), ("decoding", "cancelled"),
}  # fmt: skip


@pytest.mark.parametrize(("old", "new"), list(itertools.product(JobState, JobState)))
def test_every_pair_of_states(old: JobState, new: JobState) -> None:
    assert (new in TRANSITIONS[old]) == ((old.value, new.value) in LEGAL)


def test_states_are_queued_running_or_final() -> None:
    assert {JobState.QUEUED, *RUNNING, *FINAL} == set(JobState)
    assert not RUNNING & FINAL
    assert {state for state in JobState if not TRANSITIONS[state]} == FINAL
    for state in JobState:
        assert state.name in str(job_state.__doc__)


def test_every_state_can_be_reached_and_left_by_every_way_to_end() -> None:
    reached, ends = {JobState.QUEUED}, {JobState.FAILED, JobState.CANCELLED}
    while new := set().union(*(TRANSITIONS[state] for state in reached)) - reached:
        reached |= new
    assert reached == set(JobState)
    assert all(ends <= TRANSITIONS[state] for state in set(JobState) - FINAL)


def test_an_illegal_step_says_what_was_possible() -> None:
    error = IllegalTransition("video_1", JobState.QUEUED, JobState.DECODING)
    possible = "cancelled, completed, encoding, failed"
    assert str(error) == f"job video_1: queued -> decoding is not allowed; from queued: {possible}"
    assert "nothing: the state is final" in str(IllegalTransition("video_1", JobState.FAILED, JobState.QUEUED))
    assert str(pickle.loads(pickle.dumps(error))) == str(error)  # it crosses processes


def params(**changes: object) -> dict[str, object]:
    return {
        "model": "wan", "prompt": "p", "negative_prompt": "", "width": 16, "height": 16, "num_frames": 1, "fps": 16,
        "num_inference_steps": 2, "guidance_scale": 5.0, "guidance_scale_2": None, "flow_shift": 3.0,
        "seed": 2**63 - 1, "max_sequence_length": 4, **changes,
    }  # fmt: skip


def test_a_job_survives_json() -> None:
    job = Job(id="video_1", params=VideoParams.model_validate(params()), created_at=0.1, fingerprint="f")
    assert Job.model_validate_json(job.model_dump_json()) == job


@pytest.mark.parametrize("wrong", [{"seed": -1}, {"seed": 2**63}, {"outputs": ["gif"]}, {"unknown": 1}], ids=str)
def test_params_are_closed(wrong: dict[str, object]) -> None:
    with pytest.raises(ValidationError, match=next(iter(wrong))):
        VideoParams.model_validate(params(**wrong))


def test_a_view_keeps_its_bounds() -> None:
    job = Job(id="video_1", params=VideoParams.model_validate(params()), created_at=0.1, fingerprint="f")
    assert JobView(job=job, progress=100).position is None
    for wrong in ({"progress": 101}, {"progress": -1}, {"progress": 0, "position": 0}, {"progress": 0, "eta_s": -0.1}):
        with pytest.raises(ValidationError):
            JobView.model_validate({"job": job, **wrong})
