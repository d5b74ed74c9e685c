"""Whose turn it is: places, twins, and who is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from app.api.errors import QueueFull
from app.driver.job_queue import JobQueue


class Live:
    """As much of a `LiveJob` as the queue looks at; its key is its name without the number."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.job = SimpleNamespace(params=name)
        self.progress = SimpleNamespace(eta_s=lambda: 2.0)
        self.told = 0

    def announce(self) -> None:
        self.told += 1


class Queue:
    def __init__(self, capacity: int, max_queued: int = 10, twins: bool = True) -> None:
        self.started: list[str] = []
        key: Any = (lambda params: params.rstrip("0123456789") or None) if twins else (lambda params: None)
        self.queue = JobQueue("m", capacity, max_queued, lambda live: self.started.append(live.name), key)
        self.jobs: dict[str, Any] = {}

    def add(self, *names: str) -> None:
        for name in names:
            self.jobs[name] = Live(name)
            self.queue.add(self.jobs[name])


def test_first_come_first_served_within_the_capacity() -> None:
    q = Queue(2, twins=False)
    q.add("a1", "a2", "a3")
    assert q.started == ["a1", "a2"]
    assert [q.queue.position(q.jobs[name]) for name in ("a1", "a3")] == [None, 1]
    assert q.queue.wait_s(q.jobs["a3"]) == 2.0  # two ahead, two places
    q.queue.done(q.jobs["a1"])
    assert q.started == ["a1", "a2", "a3"]
    assert q.queue.idle


def test_a_twin_waits_beside_a_free_place_and_others_pass_it() -> None:
    q = Queue(2)
    q.add("a1", "a2", "b1")
    assert q.started == ["a1", "b1"]
    q.queue.done(q.jobs["b1"])
    assert q.started == ["a1", "b1"]  # a place alone does not do
    q.queue.done(q.jobs["a1"])
    assert q.started == ["a1", "b1"]  # its result is not stored yet
    q.queue.release(q.jobs["a1"])
    assert q.started == ["a1", "b1", "a2"]
    q.queue.release(q.jobs["a1"])  # again: the key is another's by now
    q.add("a3")
    assert q.started == ["a1", "b1", "a2"]


def test_a_waiting_twin_can_be_taken_out_and_jobs_without_a_key_have_none() -> None:
    q = Queue(3)
    q.add("a1", "a2", "1", "2")
    assert q.started == ["a1", "1", "2"]
    assert q.queue.remove(q.jobs["a2"])
    assert not q.queue.remove(q.jobs["a1"])
    q.queue.done(q.jobs["a1"])
    q.queue.release(q.jobs["a1"])
    q.queue.release(q.jobs["1"])
    assert q.started == ["a1", "1", "2"]


def test_waiting_twins_count_as_waiting() -> None:
    q = Queue(1, max_queued=2)
    q.add("a1", "a2", "a3")
    with pytest.raises(QueueFull, match=r"2 jobs wait, as many as jobs.max_queued allows"):
        q.queue.promise()
