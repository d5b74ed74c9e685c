from __future__ import annotations

import json
import pickle

import pytest

from app.api.errors import ApiError, NotReady, QueueFull, UnknownField, WrongState, response_of, shown


@pytest.mark.parametrize("kind", ApiError.__subclasses__())
def test_every_error_crosses_a_process_border_whole(kind: type[ApiError]):
    error = pickle.loads(pickle.dumps(kind("seed: got -1", "seed", 1.5)))
    assert type(error) is kind
    assert (error.message, error.param, error.retry_after_s, str(error)) == (
        "seed: got -1",
        "seed",
        1.5,
        "seed: got -1",
    )


def test_envelope_is_openai_s():
    answer = response_of(UnknownField("x: unknown", "x"))
    assert answer.status_code == 400
    assert json.loads(answer.body) == {
        "error": {"message": "x: unknown", "type": "invalid_request_error", "param": "x", "code": "unknown_field"}
    }


def test_retry_after_is_whole_seconds_and_never_zero():  # RFC 9110: delay-seconds; 0 would invite a storm
    assert response_of(QueueFull("full", retry_after_s=2.1)).headers["retry-after"] == "3"
    assert response_of(NotReady("soon", retry_after_s=0.2)).headers["retry-after"] == "1"
    assert "retry-after" not in response_of(NotReady("some day")).headers


def test_the_openai_client_is_told_not_to_repeat_a_conflict():
    assert response_of(WrongState("final")).headers["x-should-retry"] == "false"
    assert "x-should-retry" not in response_of(NotReady("soon")).headers


def test_lone_surrogates_and_long_names_can_be_answered():
    body = json.loads(response_of(UnknownField("a\ud800", "\ud800" + "n" * 100_000)).body)
    assert body["error"]["message"] == r"a\ud800"
    assert len(body["error"]["param"]) < 100


def test_shown_values_are_short_and_never_fail():
    deep: list = []
    for _ in range(100_000):
        deep = [deep]
    assert shown("x" * 1000).endswith("... (1002 characters)")
    assert shown(float("nan")) == "NaN"
    assert shown(deep) == "a deeply nested list"
