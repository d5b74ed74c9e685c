"""The driver with fake deployments and a real table and storage: every phase, every race, every loss, restarts."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ray.exceptions import RayActorError
from safetensors.torch import save

from app.api.errors import NotReady, QueueFull, UnknownJob, WrongState
from app.config import Jobs
from app.driver import job_run, readiness
from app.driver.job_state import FINAL, Job, JobState, JobView, VideoParams
from app.driver.job_store import JobStore
from app.driver.video_driver import VideoDriver
from deployments.gang.gang_lost import GangLost
from deployments.storage import Storage
from tests.fake_services import FakeServices

pytestmark = pytest.mark.anyio
SOON_S = 5.0
"""Everything here happens within milliseconds; a loaded machine may take longer."""


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readiness, "RETRY_PAUSE_S", 0.0)
    monkeypatch.setattr(job_run, "LATE_WRITES_S", 0.05)


@pytest.fixture
def jobs(tmp_path: Path) -> Jobs:
    return Jobs(database_url=f"sqlite:///{tmp_path}/jobs.db", storage_url=f"{tmp_path}/results", max_queued=2)


@pytest.fixture
def storage(jobs: Jobs) -> Storage:
    return Storage(jobs.storage_url)


@pytest.fixture
def store(jobs: Jobs) -> JobStore:
    return JobStore(jobs.database_url)


@pytest.fixture
def fake(storage: Storage) -> FakeServices:
    return FakeServices(storage)


class Drivers:
    """Starts drivers; they end with the test."""

    def __init__(self, jobs: Jobs) -> None:
        self._jobs, self._started = jobs, list[VideoDriver]()

    def start(self, fake: FakeServices) -> VideoDriver:
        driver = VideoDriver([fake.services()], self._jobs)
        self._started.append(driver)
        return driver

    async def ready(self, fake: FakeServices) -> VideoDriver:
        driver = self.start(fake)
        while not (await driver.readiness())["wan"]["ready"]:
            await asyncio.sleep(0.01)
        fake.gang.arguments.clear()
        fake.gang.pinned.clear()
        fake.decoder.stage.calls.clear()
        fake.decoder.stage.arguments.clear()
        fake.text.stage.calls.clear()
        return driver

    async def end(self) -> None:
        for driver in self._started:
            await end(driver)


async def end(driver: VideoDriver) -> None:
    """As when its process goes: its loop cancels every task."""
    while tasks := list(driver._background._tasks):
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


@pytest.fixture
async def drivers(jobs: Jobs) -> AsyncIterator[Drivers]:
    drivers = Drivers(jobs)
    yield drivers
    await drivers.end()


@pytest.fixture
async def driver(fake: FakeServices, drivers: Drivers) -> AsyncIterator[VideoDriver]:
    driver = await drivers.ready(fake)
    yield driver
    await driver.check_health()


def params(**changes: Any) -> VideoParams:
    values: dict[str, Any] = {
        "model": "wan",
        "prompt": "a",
        "negative_prompt": "",
        "width": 64,
        "height": 48,
        "num_frames": 17,
        "fps": 8,
        "num_inference_steps": 4,
        "guidance_scale": 5.0,
        "guidance_scale_2": None,
        "flow_shift": 3.0,
        "seed": 1,
        "max_sequence_length": 16,
    }
    return VideoParams(**{**values, **changes})


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(SOON_S):
        while not condition():
            await asyncio.sleep(0.005)


async def soon(awaitable: Awaitable[Any]) -> Any:
    async with asyncio.timeout(SOON_S):
        return await awaitable


async def create(driver: VideoDriver, **changes: Any) -> str:
    return (await driver.create(params(**changes))).job.id


async def until_state(driver: VideoDriver, job_id: str, state: JobState) -> JobView:
    async with asyncio.timeout(SOON_S):
        while (view := await driver.get(job_id)).job.state is not state:
            await asyncio.sleep(0.005)
    return view


async def in_phase(driver: VideoDriver, fake: FakeServices, phase: JobState, **changes: Any) -> str:
    """A job that stays in this phase.  changes: of its parameters."""
    if phase is JobState.QUEUED:
        fake.text.stage.held = True
        await create(driver)
        job_id = await create(driver, **changes)
        await until(lambda: fake.text.stage.calls)
        return job_id
    fake.text.stage.held = phase is JobState.ENCODING
    fake.decoder.stage.held = phase is JobState.DECODING
    if phase is JobState.DENOISING:
        fake.gang.gates[2] = asyncio.Event()
    job_id = await create(driver, **changes)
    await until_state(driver, job_id, phase)
    if phase is JobState.DENOISING:
        await until(lambda: driver._live[job_id].progress.step == 2)
    return job_id


def release(fake: FakeServices) -> None:
    """New calls succeed at once."""
    fake.text.stage.held = fake.decoder.stage.held = False
    fake.gang.gates.clear()


PHASES = [JobState.QUEUED, JobState.ENCODING, JobState.DENOISING, JobState.DECODING]


async def test_a_job_runs_through_its_phases(driver: VideoDriver, fake: FakeServices, storage: Storage):
    job_id = await create(driver)
    seen = [view async for view in driver.events(job_id)]
    phases = [view.job.state for view in seen]
    assert [p for i, p in enumerate(phases) if i == 0 or p != phases[i - 1]][-4:] == [
        JobState.ENCODING,
        JobState.DENOISING,
        JobState.DECODING,
        JobState.COMPLETED,
    ]
    assert [view.progress for view in seen] == sorted(view.progress for view in seen)
    assert all(view.progress < 100 for view in seen[:-1])  # 100 means that the file is there
    last = seen[-1]
    assert (last.progress, last.job.step, last.job.attempt, last.job.gang) == (100, 4, 1, "g1")
    assert last.job.files == {"video.mp4": 1}
    assert {"queued", "encoding", "denoising", "decoding", "file", "attempt"} == set(last.job.timings)
    assert storage.list(job_id) == (f"{job_id}/video.mp4",)
    assert await driver.plan(job_id) == (await driver.plan(job_id))
    assert len((await driver.plan(job_id))["steps"]) == 4


@pytest.mark.parametrize("phase", PHASES)
async def test_cancel_in_every_phase(driver: VideoDriver, fake: FakeServices, storage: Storage, phase: JobState):
    job_id = await in_phase(driver, fake, phase)
    storage.put_bytes(b"state", f"{job_id}/solver.safetensors")
    watching = asyncio.ensure_future(anext(v async for v in driver.events(job_id) if v.job.state in FINAL))
    view = await soon(driver.cancel(job_id))
    assert (view.job.state, view.position, view.eta_s) == (JobState.CANCELLED, None, None)
    assert view.job.finished_at is not None
    assert (await soon(watching)).job.state is JobState.CANCELLED
    assert storage.list(job_id) == ()
    match phase:
        case JobState.ENCODING:
            assert fake.text.stage.calls[-1].cancelled_by_caller
        case JobState.DENOISING:
            assert fake.gang.cancelled == [job_id]
            assert view.job.step == 2
        case JobState.DECODING:
            assert fake.decoder.stage.calls[-1].cancelled_by_caller
    storage.put_bytes(b"late", f"{job_id}/solver.safetensors")  # a rank had begun to save when it heard of the cancel
    await until(lambda: storage.list(job_id) == ())
    assert (await driver.cancel(job_id)).job.state is JobState.CANCELLED  # again: no error, no change
    release(fake)
    for other in [i for i in driver._live if i != job_id]:
        await soon(driver.cancel(other))
    assert (await soon(driver.wait(await create(driver)))).job.state is JobState.COMPLETED


async def test_two_cancels_at_once_agree(driver: VideoDriver, fake: FakeServices):
    for phase in (JobState.QUEUED, JobState.DENOISING):
        job_id = await in_phase(driver, fake, phase)
        views = await soon(asyncio.gather(driver.cancel(job_id), driver.cancel(job_id)))
        assert [view.job.state for view in views] == [JobState.CANCELLED] * 2
        for other in list(driver._live):
            await soon(driver.cancel(other))
        release(fake)


class SlowTransition:
    """Holds the write of one transition until told to go on."""

    def __init__(self, driver: VideoDriver, state: JobState, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.go = threading.Event(), threading.Event()
        real = driver._store.transition

        def transition(job_id: str, new: JobState, **changes: Any) -> Job:
            if new is state:
                self.begun.set()
                assert self.go.wait(SOON_S)
            return real(job_id, new, **changes)

        monkeypatch.setattr(driver._store, "transition", transition)


async def test_cancel_that_comes_too_late_is_refused(
    driver: VideoDriver, storage: Storage, monkeypatch: pytest.MonkeyPatch
):
    """The result is being written into the table: the job completes, whole, and the cancel says so."""
    slow = SlowTransition(driver, JobState.COMPLETED, monkeypatch)
    job_id = await create(driver)
    await until(slow.begun.is_set)
    cancelling = asyncio.ensure_future(driver.cancel(job_id))
    await asyncio.sleep(0.02)
    assert not cancelling.done()
    slow.go.set()
    with pytest.raises(WrongState, match="is completed: only a queued or running job"):
        await soon(cancelling)
    assert (await driver.get(job_id)).progress == 100
    assert storage.list(job_id) == (f"{job_id}/video.mp4",)


@pytest.mark.parametrize("state", [JobState.ENCODING, JobState.DENOISING, JobState.DECODING])
async def test_cancel_during_a_transition(
    driver: VideoDriver, monkeypatch: pytest.MonkeyPatch, state: JobState, store: JobStore
):
    slow = SlowTransition(driver, state, monkeypatch)
    job_id = await create(driver)
    await until(slow.begun.is_set)
    cancelling = asyncio.ensure_future(driver.cancel(job_id))
    await asyncio.sleep(0.02)
    slow.go.set()  # in whichever order the two writes come, the table allows only one outcome
    assert (await soon(cancelling)).job.state is JobState.CANCELLED
    assert store.get(job_id).state is JobState.CANCELLED
    assert job_id not in driver._live


async def test_the_queue_is_bounded_and_says_so_at_once(driver: VideoDriver, fake: FakeServices):
    fake.text.stage.held = True
    made = await asyncio.gather(*(create(driver) for _ in range(3)))  # one runs, max_queued = 2 wait
    began = time.perf_counter()
    with pytest.raises(QueueFull, match=r"2 jobs wait, as many as jobs.max_queued allows") as refused:
        await create(driver)
    assert time.perf_counter() - began < 0.05  # no disk, no network: a refusal must not wait behind the load
    assert refused.value.retry_after_s is not None
    positions = [(await driver.get(job_id)).position for job_id in made]
    assert sorted(positions, key=lambda p: p or 0) == [None, 1, 2]
    assert len((await driver.list(10, None, "asc")).jobs) == 3  # the refused one left no row
    by_position = dict(zip(positions, made, strict=True))
    await soon(driver.cancel(by_position[1]))
    assert (await driver.get(by_position[2])).position == 1
    await create(driver)  # there is a place again


async def test_waiting_jobs_hear_that_they_move_up(driver: VideoDriver, fake: FakeServices):
    fake.decoder.stage.held = True
    made = [await create(driver) for _ in range(3)]
    events = driver.events(made[2])
    assert (await anext(events)).position == 2
    await until(lambda: fake.decoder.stage.calls)
    fake.decoder.finish()
    async with asyncio.timeout(SOON_S):
        assert (await anext(v async for v in events if v.position != 2)).position == 1


async def test_a_queued_jobs_eta_counts_those_before_it(driver: VideoDriver, fake: FakeServices):
    """The warm-up has shown 0.5 s for the prompt, 1 s a step, 0.375 s for the file: 4.875 s a job of this shape."""
    fake.text.stage.held = True
    made = [await create(driver) for _ in range(3)]
    await until(lambda: fake.text.stage.calls)
    etas = [(await driver.get(job_id)).eta_s for job_id in made]
    assert etas == pytest.approx([4.875, 9.75, 14.625], abs=SOON_S / 10)


async def test_a_caller_that_goes_away_leaves_no_row_that_nobody_runs(
    driver: VideoDriver, monkeypatch: pytest.MonkeyPatch, store: JobStore
):
    begun, go, real = threading.Event(), threading.Event(), driver._store.create

    def slow(job: Job) -> None:
        begun.set()
        assert go.wait(SOON_S)
        real(job)

    monkeypatch.setattr(driver._store, "create", slow)
    creating = asyncio.ensure_future(driver.create(params()))
    await until(begun.is_set)
    creating.cancel()
    go.set()
    await until(lambda: store.counts()[JobState.COMPLETED] == 1)


async def test_a_failed_write_of_a_new_job_frees_its_place(driver: VideoDriver, monkeypatch: pytest.MonkeyPatch):
    def full(job: Job) -> None:
        raise OSError("disk full")

    with monkeypatch.context() as broken:
        broken.setattr(driver._store, "create", full)
        for _ in range(5):  # more than max_queued
            with pytest.raises(OSError, match="disk full"):
                await create(driver)
    assert (await soon(driver.wait(await create(driver)))).job.state is JobState.COMPLETED


async def test_delete(driver: VideoDriver, fake: FakeServices, storage: Storage):
    running = await in_phase(driver, fake, JobState.DENOISING)
    with pytest.raises(WrongState, match="cancel it first"):
        await driver.delete(running)
    await soon(driver.cancel(running))
    release(fake)
    done = await create(driver)
    await soon(driver.wait(done))
    await driver.delete(done)
    assert storage.list(done) == ()
    for call in (driver.get, driver.cancel, driver.delete, driver.plan, driver.wait):
        with pytest.raises(UnknownJob, match="no such job"):
            await call(done)
    with pytest.raises(UnknownJob):
        await anext(driver.events(done))
    with pytest.raises(UnknownJob):
        await driver.list(5, done, "desc")


async def test_list_shows_each_job_as_it_is_now(
    driver: VideoDriver, fake: FakeServices, monkeypatch: pytest.MonkeyPatch
):
    """A job that ends between the reading of the page and its answer is shown completed, not as a stale row."""
    job_id = await in_phase(driver, fake, JobState.DECODING)
    rows = driver._store.list(5)
    assert rows[0].state is JobState.DECODING
    fake.decoder.finish()
    await soon(driver.wait(job_id))
    monkeypatch.setattr(driver._store, "list", lambda *_: rows)
    (view,) = (await driver.list(5, None, "desc")).jobs
    assert (view.job.state, view.progress) == (JobState.COMPLETED, 100)


LOST = [RayActorError(), GangLost("rank 1 is gone")]


@pytest.mark.parametrize("lost", LOST, ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("phase", [JobState.ENCODING, JobState.DENOISING, JobState.DECODING])
async def test_a_lost_worker_costs_an_attempt_and_no_job(
    driver: VideoDriver, fake: FakeServices, phase: JobState, lost: Exception
):
    match phase:
        case JobState.ENCODING:
            fake.text.stage.failures.append(lost)
        case JobState.DENOISING:
            fake.gang.failures.append((2, lost))
        case _:
            fake.decoder.stage.failures.append(lost)
    view = await soon(driver.wait(await create(driver)))
    assert (view.job.state, view.job.attempt) == (JobState.COMPLETED, 2)
    assert (await driver.readiness())["wan"]["ready"]


async def test_the_next_attempt_waits_for_a_warm_up(driver: VideoDriver, fake: FakeServices):
    """A gang that is going down is still in the router for seconds: it must not use up a job's attempts."""
    fake.gang.failures += [(1, GangLost("rank 1 is gone"))] * 20  # the job, then 19 warm-ups
    view = await soon(driver.wait(await create(driver)))
    assert (view.job.state, view.job.attempt) == (JobState.COMPLETED, 2)
    assert not fake.gang.failures


async def test_a_job_that_loses_every_worker_fails_and_says_so(driver: VideoDriver, fake: FakeServices):
    job_id = await in_phase(driver, fake, JobState.QUEUED)
    fake.gang.failures.clear()
    original = fake.gang._events

    async def deadly(key: str, *arguments: Any) -> AsyncIterator[dict[str, Any]]:
        async for event in original(key, *arguments):
            if key == job_id:
                raise GangLost("rank 0: out of memory")
            yield event

    fake.gang._events = deadly  # type: ignore[method-assign]
    release(fake)
    for other in [i for i in driver._live if i != job_id]:
        await soon(driver.cancel(other))
    job = (await soon(driver.wait(job_id))).job
    assert (job.state, job.attempt) == (JobState.FAILED, 3)
    assert job.error is not None
    assert job.error.code == "worker_lost"
    assert "3 times in a row (jobs.max_attempts)" in job.error.message
    assert "out of memory" in job.error.message
    assert (await soon(driver.wait(await create(driver)))).job.state is JobState.COMPLETED


async def test_progress_forgives_losses(driver: VideoDriver, fake: FakeServices, storage: Storage):
    """Five losses, each one step later than the one before: more than max_attempts, but never without progress."""
    job_id = await in_phase(driver, fake, JobState.QUEUED, num_inference_steps=8)
    original, runs = fake.gang._events, iter(range(1, 6))

    async def mortal(key: str, *arguments: Any) -> AsyncIterator[dict[str, Any]]:
        last = next(runs, None) if key == job_id else None
        async for event in original(key, *arguments):
            yield event
            if last is not None and event.get("done") == last:
                raise RayActorError

    fake.gang._events = mortal  # type: ignore[method-assign]
    release(fake)
    for other in [i for i in driver._live if i != job_id]:
        await soon(driver.cancel(other))
    job = (await soon(driver.wait(job_id))).job
    assert (job.state, job.attempt) == (JobState.COMPLETED, 6)


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (ValueError("hidden size 3"), "generation_failed", "ValueError: hidden size 3"),
        (MemoryError("needs 9 GiB"), "out_of_memory", "64x48 with 17 frames did not fit"),
    ],
)
async def test_a_failure_is_told_in_words(
    driver: VideoDriver, fake: FakeServices, storage: Storage, error: Exception, code: str, words: str
):
    fake.decoder.stage.failures.append(error)
    job = (await soon(driver.wait(await create(driver)))).job
    assert job.state is JobState.FAILED
    assert job.attempt == 1  # another worker would fail alike
    assert job.error is not None
    assert job.error.code == code
    assert words in job.error.message
    assert (await soon(driver.wait(await create(driver)))).job.state is JobState.COMPLETED


def saved_state(step: int) -> bytes:
    numbers = {"lower_order_nums": 1, "this_order": 1, "timestep_list": []}
    return save({"latents": torch.zeros(1, 16, 5, 6, 8)}, {"step": str(step), "numbers": json.dumps(numbers)})


STEP_3, ALL_STEPS = saved_state(3), saved_state(4)


async def test_a_resumed_job_computes_only_what_is_left(driver: VideoDriver, fake: FakeServices, storage: Storage):
    job_id = await in_phase(driver, fake, JobState.QUEUED)
    storage.put_bytes(STEP_3, f"{job_id}/solver.safetensors")
    release(fake)
    for other in [i for i in driver._live if i != job_id]:
        await soon(driver.cancel(other))
    job = (await soon(driver.wait(job_id))).job
    assert (job.state, job.step) == (JobState.COMPLETED, 4)
    (_, spec, blobs, start, steps, _), *_ = (a for a in fake.gang.arguments if a[0] == job_id)
    assert (start, steps, spec["resume"]["step"]) == (3, 1, 3)
    assert blobs[-1] == STEP_3
    assert [step["index"] for step in (await driver.plan(job_id))["steps"]] == [3]


async def test_a_job_with_all_steps_done_is_only_decoded(driver: VideoDriver, fake: FakeServices, storage: Storage):
    job_id = await in_phase(driver, fake, JobState.QUEUED)
    storage.put_bytes(ALL_STEPS, f"{job_id}/solver.safetensors")
    release(fake)
    for other in [i for i in driver._live if i != job_id]:
        await soon(driver.cancel(other))
    assert (await soon(driver.wait(job_id))).job.state is JobState.COMPLETED
    assert job_id not in [a[0] for a in fake.gang.arguments]
    assert fake.decoder.stage.arguments[-1][1] == [ALL_STEPS]


@pytest.mark.parametrize("torn", [b"", b"12345678", STEP_3[:-1]], ids=["empty", "junk", "cut"])
async def test_an_unreadable_state_starts_from_the_seed(
    driver: VideoDriver, fake: FakeServices, storage: Storage, torn: bytes
):
    job_id = await in_phase(driver, fake, JobState.QUEUED)
    storage.put_bytes(torn, f"{job_id}/solver.safetensors")
    release(fake)
    for other in [i for i in driver._live if i != job_id]:
        await soon(driver.cancel(other))
    assert (await soon(driver.wait(job_id))).job.state is JobState.COMPLETED
    assert [(a[3], a[4]) for a in fake.gang.arguments if a[0] == job_id] == [(0, 4)]


@pytest.mark.parametrize("phase", PHASES)
async def test_a_new_driver_finishes_what_the_old_one_had(
    fake: FakeServices, drivers: Drivers, storage: Storage, store: JobStore, phase: JobState
):
    """The old driver's tasks are cancelled with its loop, as at a shutdown: that must not cancel jobs."""
    old = await drivers.ready(fake)
    job_id = await in_phase(old, fake, phase)
    await end(old)
    assert store.get(job_id).state is phase
    fresh = FakeServices(storage)
    new = drivers.start(fresh)
    job = (await soon(new.wait(job_id))).job
    assert job.state is JobState.COMPLETED
    assert job.attempt == (1 if phase is JobState.QUEUED else 2)
    if phase in (JobState.DENOISING, JobState.DECODING):
        assert "g1" in fresh.gang.pinned  # it asks the gang that had the job
    await new.check_health()


async def test_jobs_are_taken_up_in_order_after_a_restart(fake: FakeServices, drivers: Drivers, storage: Storage):
    old = await drivers.ready(fake)
    fake.gang.gates[0] = asyncio.Event()
    made = [await create(old) for _ in range(3)]
    await end(old)
    fresh = FakeServices(storage)
    new = drivers.start(fresh)
    for job_id in made:
        await soon(new.wait(job_id))
    keys = [a[0] for a in fresh.gang.arguments if a[0] in made]
    assert keys == made


async def test_a_driver_that_was_replaced_lets_go(
    fake: FakeServices, drivers: Drivers, storage: Storage, store: JobStore
):
    """Two drivers for a moment: the new one owns the row, the old one's work must neither fail nor complete it."""
    old = await drivers.ready(fake)
    job_id = await in_phase(old, fake, JobState.DENOISING)
    store.transition(job_id, JobState.QUEUED)  # as another driver does when it starts
    fake.gang.gates.pop(2).set()
    await until(lambda: job_id not in old._live)
    assert store.get(job_id).state is JobState.QUEUED
    with pytest.raises(NotReady, match="another one is taking over"):
        await old.wait(job_id)
    await old.check_health()


@pytest.mark.parametrize("end", ["lost", "failed", "finished"])
async def test_a_newer_attempt_is_not_disturbed(
    fake: FakeServices, drivers: Drivers, storage: Storage, store: JobStore, end: str
):
    """A driver that drains while its successor runs the job: whatever becomes of its own attempt stays its own."""
    old = await drivers.ready(fake)
    job_id = await in_phase(old, fake, JobState.DENOISING)
    fresh = FakeServices(storage)
    fresh.gang.gates[2] = asyncio.Event()
    new = drivers.start(fresh)
    await until(lambda: new._live[job_id].progress.step == 2)
    match end:
        case "lost":
            fake.gang.break_next = GangLost("another caller has taken over")
        case "failed":
            fake.gang.break_next = ValueError("bad")
    fake.gang.gates.pop(2).set()
    await until(lambda: job_id not in old._live)
    assert store.get(job_id).state is JobState.DENOISING
    fresh.gang.gates.pop(2).set()
    assert (await soon(new.wait(job_id))).job.state is JobState.COMPLETED
    await old.check_health()


async def test_jobs_of_changed_or_missing_models_fail_with_the_reason(
    fake: FakeServices, drivers: Drivers, store: JobStore
):
    for index, changes in enumerate([{"model": "gone"}, {}]):
        store.create(Job(id=f"video_{index}", params=params(**changes), created_at=1.0, fingerprint="0" * 64))
    driver = await drivers.ready(fake)
    errors = [(await driver.get(f"video_{index}")).job.error for index in range(2)]
    assert [error.code for error in errors if error] == ["model_not_served", "model_changed"]
    with pytest.raises(WrongState, match="its model gone is not served"):
        await driver.plan("video_0")


async def test_a_database_that_fails_restarts_the_driver(
    fake: FakeServices, drivers: Drivers, monkeypatch: pytest.MonkeyPatch
):
    driver = await drivers.ready(fake)

    def broken(*_: object, **__: object) -> Job:
        raise OSError("disk full")

    monkeypatch.setattr(driver._store, "transition", broken)
    await create(driver)
    await until(lambda: driver._background.failure)
    with pytest.raises(RuntimeError, match="the driver cannot go on"):
        await driver.check_health()


async def test_not_ready_says_why(fake: FakeServices, drivers: Drivers):
    fake.text.stage.failures += [RuntimeError("no tokenizer")] * 3
    driver = drivers.start(fake)
    state = (await driver.readiness())["wan"]
    assert not state["ready"]
    assert "no request has run" in state["reason"]
    reasons = set()
    async with asyncio.timeout(SOON_S):
        while not (state := (await driver.readiness())["wan"])["ready"]:
            reasons.add(state["reason"])
            await asyncio.sleep(0)
    assert any("no tokenizer" in reason for reason in reasons)


async def test_requests_in_flight_run_at_once(storage: Storage, drivers: Drivers):
    fake = FakeServices(storage, in_flight=2)
    driver = await drivers.ready(fake)
    fake.gang.gates[2] = asyncio.Event()
    made = [await create(driver) for _ in range(3)]
    await until(lambda: len(fake.gang.running) == 2)
    assert [(await driver.get(job_id)).position for job_id in made] == [None, None, 1]
    fake.gang.gates.pop(2).set()
    for job_id in made:
        assert (await soon(driver.wait(job_id))).job.state is JobState.COMPLETED
