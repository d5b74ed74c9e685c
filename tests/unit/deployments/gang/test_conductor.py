"""Rank 0's loop with a worker that only remembers: order, bounds, cancel, take-over, the end."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from deployments.gang.conductor import Conductor, Result, Submission, follow
from deployments.gang.messages import Close, Message, Open, Run, Stop


class FakeWorker:
    """Also the announcer.  `log` has what was announced and done; `hooks` are called when an entry is made."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.hooks: dict[str, Callable[[], object]] = {}
        self.vetoes: set[int] = set()
        self.tensors: dict[int, Mapping[str, Tensor]] = {}

    def _note(self, entry: str) -> None:
        self.log.append(entry)
        if hook := self.hooks.pop(entry, None):
            hook()

    def announce(self, message: Message) -> None:
        match message:
            case Open(request):
                self._note(f"announce open {request}")
            case Run(request, position, digest, native):
                assert digest == 1000 + request
                self._note(f"announce run {request}.{position}{' native' if native else ''}")
            case Close(request):
                self._note(f"announce close {request}")
            case Stop():
                self._note("announce stop")

    def open(self, request: int, spec: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        self.tensors[request] = dict(tensors)
        self._note(f"open {request}")

    def vetoed(self, request: int) -> bool:
        return request in self.vetoes

    def run(self, request: int, position: int, digest: int, native: bool) -> None:
        self._note(f"run {request}.{position}{' native' if native else ''}")

    def collect(self, request: int, position: int) -> None:
        self._note(f"collect {request}.{position}")

    def result(self, request: int) -> Result:
        return Result(torch.tensor([float(request)]), [])

    def close(self, request: int) -> None:
        self._note(f"close {request}")

    def done(self, kind: str) -> list[str]:
        """Entries of the worker itself of one kind, without it."""
        return [entry.removeprefix(f"{kind} ") for entry in self.log if entry.startswith(f"{kind} ")]


class FakeListener:
    def __init__(self, then: Callable[[], None] | None = None) -> None:
        self.steps: list[int] = []
        self.result: Result | None = None
        self.error: BaseException | None = None
        self.ends = 0
        self._then = then

    def on_step(self, done: int) -> None:
        assert self.ends == 0, "a step after the end"
        self.steps.append(done)

    def on_result(self, result: Result, seconds: float) -> None:
        assert seconds >= 0
        self.result = result
        self._end()

    def on_failure(self, error: BaseException) -> None:
        self.error = error
        self._end()

    def _end(self) -> None:
        self.ends += 1
        assert self.ends == 1, "two ends"
        if self._then is not None:
            self._then()


class Gang:
    """A conductor whose loop ends when every listener has heard of an end, or nothing is left to do."""

    def __init__(self, in_flight: int = 2) -> None:
        self.worker = FakeWorker()
        self.conductor = Conductor(self.worker, self.worker, in_flight)
        self._open = 0

    def listener(self) -> FakeListener:
        self._open += 1
        return FakeListener(self._ended)

    def _ended(self) -> None:
        self._open -= 1
        if self._open == 0:
            self.conductor.stop()

    def forget(self) -> None:
        """A listener that will hear of no end: its request is cancelled."""
        self._ended()

    def submit(self, key: str, steps: int = 3, start: int = 0, listener: FakeListener | None = None) -> FakeListener:
        heard = listener or self.listener()
        tensors = {"text.positive": torch.ones(1)}
        self.conductor.submit(Submission(key, {"key": key}, tensors, start, steps, 1000 + int(key), heard))
        return heard


def cancel(gang: Gang, key: str, listener: FakeListener) -> None:
    gang.conductor.cancel(key, listener)
    gang.forget()


def test_one_request_step_by_step():
    gang = Gang()
    listener = gang.submit("1", steps=2)
    gang.conductor.run()
    assert gang.worker.log == [
        "announce open 1",
        "open 1",
        "announce run 1.0",
        "run 1.0",
        "collect 1.0",
        "announce run 1.1",
        "run 1.1",
        "collect 1.1",
        "announce close 1",
        "close 1",
        "announce stop",
    ]
    assert listener.steps == [1, 2]
    assert listener.result is not None
    assert listener.result.latents.item() == 1.0


def test_two_requests_take_turns_and_neither_waits_for_the_other():
    """The second's step is launched before the first's is collected: that is what fills the stages."""
    gang = Gang()
    first, second = gang.submit("1"), gang.submit("2")
    gang.conductor.run()
    order = [entry for entry in gang.worker.log if entry.startswith(("run", "collect"))]
    assert order[:4] == ["run 1.0", "run 2.0", "collect 1.0", "run 1.1"]
    assert gang.worker.done("run") == ["1.0", "2.0", "1.1", "2.1", "1.2", "2.2"]
    assert first.steps == second.steps == [1, 2, 3]


def test_a_late_request_gets_its_turns_at_once():
    gang = Gang()
    first, late = gang.submit("1", steps=6), gang.listener()
    gang.worker.hooks["collect 1.2"] = partial(gang.submit, "2", steps=2, listener=late)
    gang.conductor.run()
    assert gang.worker.done("run") == ["1.0", "1.1", "1.2", "2.0", "1.3", "2.1", "1.4", "1.5"]
    assert (len(first.steps), len(late.steps)) == (6, 2)


def test_every_rank_hears_before_rank_0_runs():
    gang = Gang()
    for key in ("1", "2", "3"):
        gang.submit(key)
    gang.conductor.run()
    announced = [entry.removeprefix("announce ") for entry in gang.worker.log if entry.startswith("announce")]
    done = [e for e in gang.worker.log if e.startswith(("open", "run", "close"))]
    assert announced[:-1] == done  # the same order, and nothing that is not announced
    assert announced[-1] == "stop"
    for entry in done:
        assert gang.worker.log.index(f"announce {entry}") < gang.worker.log.index(entry)


def test_in_flight_is_a_bound():
    gang = Gang(in_flight=2)
    for key in ("1", "2", "3"):
        gang.submit(key)
    gang.conductor.run()
    log = gang.worker.log
    assert log.index("open 2") < log.index("run 1.0")
    assert log.index("close 1") < log.index("open 3") < log.index("run 3.0")


def test_steps_count_from_the_start_of_the_plan():
    gang = Gang()
    assert gang.submit("1", steps=2, start=5).steps == []
    resumed = gang.submit("2", steps=2, start=5)
    gang.conductor.run()
    assert resumed.steps == [6, 7]
    assert gang.worker.done("run")[-1] == "2.1"  # positions in the plan, not solver steps


def test_a_plan_without_steps_has_its_result_at_once():
    gang = Gang()
    listener = gang.submit("1", steps=0)
    gang.conductor.run()
    assert gang.worker.done("run") == []
    assert listener.result is not None


def test_tensors_are_let_go_after_the_opening():
    gang = Gang()
    submission = Submission("1", {}, {"text": torch.ones(3)}, 0, 1, 1001, gang.listener())
    gang.conductor.submit(submission)
    gang.conductor.run()
    assert list(gang.worker.tensors[1]) == ["text"]
    assert submission.tensors == {}


def test_a_veto_makes_the_following_steps_native():
    gang = Gang()
    gang.submit("1", steps=3)
    gang.worker.hooks["collect 1.0"] = lambda: gang.worker.vetoes.add(1)
    gang.conductor.run()
    assert gang.worker.done("run") == ["1.0", "1.1 native", "1.2 native"]


def test_cancel_in_flight_collects_the_step_and_closes():
    gang = Gang()
    gone, stays = gang.submit("1", steps=9), gang.submit("2", steps=3)
    gang.worker.hooks["run 1.1"] = lambda: cancel(gang, "1", gone)
    gang.conductor.run()
    assert gang.worker.done("run") == ["1.0", "2.0", "1.1", "2.1", "2.2"]  # no step after the one in flight
    assert "1.1" in gang.worker.done("collect")
    assert gang.worker.done("close") == ["1", "2"]
    assert (gone.steps, gone.ends) == ([1], 0)
    assert stays.result is not None


def test_cancel_of_a_waiting_request_opens_nothing():
    gang = Gang(in_flight=1)
    gang.submit("1")
    gone = gang.submit("2")
    gang.worker.hooks["run 1.0"] = lambda: cancel(gang, "2", gone)
    gang.conductor.run()
    assert gang.worker.done("open") == ["1"]
    assert gone.ends == 0


def test_a_cancel_that_comes_too_late_hits_nobody():
    gang = Gang()
    done, other = gang.submit("1", steps=1), gang.submit("2", steps=5)
    gang.worker.hooks["run 2.2"] = lambda: gang.conductor.cancel("1", done)
    gang.conductor.run()
    assert done.result is not None
    assert other.steps == [1, 2, 3, 4, 5]


def test_a_second_caller_takes_over():
    """A restarted driver asks for the job its forerunner had started: it goes on, computed once."""
    gang = Gang()
    old, new = gang.submit("1", steps=4), gang.listener()
    gang.worker.hooks["run 1.2"] = partial(gang.submit, "1", steps=4, listener=new)
    gang.conductor.run()
    assert gang.worker.done("run") == ["1.0", "1.1", "1.2", "1.3"]
    assert "another caller has taken over" in str(old.error)
    assert (old.steps, new.steps) == ([1, 2], [3, 4])
    assert new.result is not None


def test_the_old_callers_cancel_does_not_hit_the_new_one():
    gang = Gang()
    old, new = gang.submit("1", steps=4), gang.listener()

    def take_over() -> None:
        gang.submit("1", steps=4, listener=new)
        gang.conductor.cancel("1", old)  # its connection is closed

    gang.worker.hooks["run 1.1"] = take_over
    gang.conductor.run()
    assert new.result is not None


def test_a_key_can_come_back_while_its_cancelled_step_is_in_flight():
    gang = Gang()
    gone, again = gang.submit("1", steps=4), gang.listener()

    gang.worker.hooks["run 1.1"] = lambda: cancel(gang, "1", gone)
    gang.worker.hooks["collect 1.1"] = lambda: resubmit(gang, again)
    gang.conductor.run()
    log = gang.worker.log
    assert log.index("close 1") < log.index("open 2")
    assert again.steps == [1, 2]
    assert gone.steps == [1]


def resubmit(gang: Gang, listener: FakeListener) -> None:
    gang.conductor.submit(Submission("1", {}, {}, 0, 2, 1002, listener))


def test_stop_collects_what_is_in_flight_and_tells_the_rest():
    gang = Gang(in_flight=1)
    running, waiting = gang.submit("1", steps=9), gang.submit("2")
    gang.worker.hooks["run 1.3"] = gang.conductor.stop
    gang.conductor.run()
    assert gang.worker.done("run")[-1] == "1.3"
    assert gang.worker.done("collect")[-1] == "1.3"
    assert gang.worker.log[-1] == "announce stop"
    for listener in (running, waiting):
        assert "shutting down" in str(listener.error)


def test_a_broken_worker_ends_the_gang_and_everyone_hears():
    gang = Gang(in_flight=1)
    running, waiting, later = gang.submit("1"), gang.submit("2"), FakeListener()

    def break_down() -> None:
        raise RuntimeError("rank 1 is gone")

    gang.worker.hooks["collect 1.1"] = break_down
    with pytest.raises(RuntimeError, match="rank 1 is gone"):
        gang.conductor.run()
    assert str(running.error) == str(waiting.error) == "rank 1 is gone"
    gang.submit("3", listener=later)
    assert str(later.error) == "rank 1 is gone"


def test_an_idle_loop_sleeps_until_there_is_work():
    gang = Gang()
    loop = threading.Thread(target=gang.conductor.run)
    loop.start()
    try:
        for key in ("1", "2", "3"):
            ended = threading.Event()
            gang.submit(key, listener=FakeListener(ended.set))
            assert ended.wait(10)
    finally:
        gang.conductor.stop()
        loop.join(10)
    assert not loop.is_alive()


def test_followers_do_what_is_announced_in_that_order():
    worker = FakeWorker()
    messages = [Open(7, {}, {}), Run(7, 0, 1007), Run(7, 1, 1007, native=True), Close(7), Stop()]

    class Channel:
        def follow(self) -> Message:
            return messages.pop(0)

    follow(worker, Channel())  # type: ignore[arg-type]
    assert worker.log == ["open 7", "run 7.0", "run 7.1 native", "close 7"]
