"""The driver with a real latent cache in its own process: what jobs get, what they leave, and what a fault costs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save as save_tensors

from app.config import Jobs
from app.driver import job_run, readiness
from app.driver.job_state import FINAL, Job, JobState, VideoParams
from app.driver.latent_reuse import LatentReuse
from app.driver.video_driver import VideoDriver
from app.planning.latent_policy import LatentPolicy
from cache_actors import latent_cache_actor
from cache_actors.latent_cache import LatentCache
from cache_actors.latent_calls import Answer, Lookup, Save
from cache_actors.latent_config import LatentCacheConfig
from cache_actors.latent_report import CacheReport
from deployments.storage import Storage
from deployments.wan.saved_state import donor_key, solver_state_key
from deployments.wan.solver_state import SolverState
from tests.fake_services import FakeServices
from tests.latents import SERVED, WordEmbedder, config, similarity_map, tier

pytestmark = pytest.mark.anyio
SHAPE = (1, 16, 5, 6, 8)
STEPS = 10


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readiness, "RETRY_PAUSE_S", 0.0)
    monkeypatch.setattr(job_run, "LATE_WRITES_S", 0.05)


class Near:
    """`LatentCacheClient` without the actor between; `away` is what every call raises."""

    def __init__(self, cache: LatentCache) -> None:
        self.cache, self.away = cache, False
        self.asked: list[Lookup] = []

    async def lookup(self, ask: Lookup) -> Answer:
        self.asked.append(ask)
        if self.away:
            raise RuntimeError("away")
        return await asyncio.to_thread(self.cache.lookup, ask)

    async def stored_result(self, ask: Lookup) -> Answer | None:
        if self.away:
            raise RuntimeError("away")
        return await asyncio.to_thread(self.cache.stored_result, ask)

    async def offer(self, save: Save) -> bool:
        if self.away:
            raise RuntimeError("away")
        return self.cache.offer(save)

    async def settled(self, timeout_s: float) -> bool:
        return await asyncio.to_thread(self.cache.flush, timeout_s)


def params(**changes: Any) -> VideoParams:
    values = {"prompt": "a red ball moves left", "num_inference_steps": STEPS, "guidance_scale": 5.0, **changes}
    return VideoParams.model_validate(
        {
            "model": "wan",
            "negative_prompt": "",
            "width": 64,
            "height": 48,
            "num_frames": 17,
            "fps": 8,
            "guidance_scale_2": None,
            "flow_shift": 3.0,
            "seed": 1,
            "max_sequence_length": 16,
            **values,
        }
    )


@pytest.fixture
def jobs(tmp_path: Path) -> Jobs:
    return Jobs(database_url=f"sqlite:///{tmp_path}/jobs.db", storage_url=f"{tmp_path}/results", max_queued=8)


@pytest.fixture
def settings(tmp_path: Path) -> LatentCacheConfig:
    return config(tmp_path / "cache", {"experimental": True})


@pytest.fixture
def near(settings: LatentCacheConfig) -> Iterator[Near]:
    cache = LatentCache(settings, similarity_map(tier(0.6, 3)), WordEmbedder())
    cache.warm()
    yield Near(cache)
    cache.close(1)


@pytest.fixture
def storage(jobs: Jobs) -> Storage:
    return Storage(jobs.storage_url)


@pytest.fixture
def fake(storage: Storage) -> FakeServices:
    return FakeServices(storage)


@pytest.fixture
async def driver(
    fake: FakeServices, jobs: Jobs, near: Near, settings: LatentCacheConfig, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[VideoDriver]:
    monkeypatch.setattr(latent_cache_actor, "LatentCacheClient", lambda timeout_s: near)
    policy = LatentPolicy(settings, SERVED, similarity_map(tier(0.6, 3)))
    driver = VideoDriver([replace(fake.services(), latent_cache=policy)], jobs)
    while not (await driver.readiness())["wan"]["ready"]:
        await asyncio.sleep(0.01)
    fake.gang.arguments.clear()
    yield driver
    await driver.check_health()
    while tasks := list(driver._background._tasks):
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def done(driver: VideoDriver, **changes: Any) -> Job:
    """A final job whose work is stored, and whose leftovers are gone."""
    view = await driver.create(params(**changes))
    async with asyncio.timeout(10):
        if view.job.state not in FINAL:
            view = await driver.wait(view.job.id)
        while driver._models["wan"].queue._taken:
            await asyncio.sleep(0.005)
    return view.job


def state(step: int, value: float = 1.0) -> bytes:
    return SolverState(step, torch.full(SHAPE, value), {}, {}).to_bytes()


def report(job: Job) -> CacheReport:
    assert job.cache is not None
    return job.cache


async def test_the_same_request_is_completed_in_the_answer_to_its_creation(driver: VideoDriver, fake: FakeServices):
    first = await done(driver)
    assert (report(first).decision, str(report(first).reason)) == ("miss", "no_candidate")
    view = await driver.create(params())
    assert (view.job.state, report(view.job).level, view.job.files) == (JobState.COMPLETED, 0, first.files)
    assert len(fake.gang.arguments) == 1


async def test_twins_are_computed_once_and_a_cancelled_one_does_not_take_the_other_along(
    driver: VideoDriver, fake: FakeServices
):
    fake.gang.gates[4] = asyncio.Event()
    first, second, third = [(await driver.create(params())).job.id for _ in range(3)]
    other = (await driver.create(params(seed=2, latent_cache="off"))).job.id
    await asyncio.sleep(0.05)
    assert [arguments[0] for arguments in fake.gang.arguments] == [first]
    await driver.cancel(first)
    fake.gang.gates.clear()
    views = [(await asyncio.wait_for(driver.wait(job), 10)).job for job in (second, third, other)]
    assert [job.state for job in views] == [JobState.COMPLETED] * 3
    assert [report(job).level for job in views] == [None, 0, None]
    assert [arguments[0] for arguments in fake.gang.arguments].count(third) == 0


async def test_a_cancelled_job_leaves_its_state_and_a_retry_goes_on(
    driver: VideoDriver, fake: FakeServices, storage: Storage
):
    fake.gang.gates[6] = asyncio.Event()
    first = (await driver.create(params())).job.id
    while not fake.gang.running:
        await asyncio.sleep(0.005)
    saved = state(5)
    storage.put_bytes(saved, solver_state_key(first))
    await driver.cancel(first)
    fake.gang.gates.clear()
    retry = await done(driver)
    assert (report(retry).level, report(retry).skipped_steps, retry.step) == (1, 5, STEPS)
    job, spec, blobs, start, steps, _ = fake.gang.arguments[-1]
    assert (job, start, steps, spec["resume"]["step"]) == (retry.id, 5, 5, 5)
    assert blobs[-1] == saved
    assert storage.list(retry.id) == (f"{retry.id}/video.mp4",)


async def test_a_paraphrase_starts_from_the_donor_with_the_order_restarted(
    driver: VideoDriver, fake: FakeServices, storage: Storage
):
    fake.gang.gates[5] = asyncio.Event()
    first = (await driver.create(params())).job.id
    while not fake.gang.running:
        await asyncio.sleep(0.005)
    assert fake.gang.arguments[-1][1]["task"]["donor_steps"] == (3,)
    donated = save_tensors({"latents": torch.zeros(SHAPE)})
    storage.put_bytes(donated, donor_key(first, 3))
    fake.gang.gates[5].set()
    finished = (await driver.wait(first)).job
    assert report(finished).saved_steps == (3,)
    while driver._models["wan"].queue._taken:
        await asyncio.sleep(0.005)
    similar = {"prompt": "a red ball moving left", "latent_cache": "approximate"}
    job = await done(driver, **similar)
    found = report(job)
    assert (found.level, found.skipped_steps, found.saved_steps, found.experimental) == (2, 3, (), True)
    _, spec, blobs, start, _, _ = fake.gang.arguments[-1]
    assert (start, blobs[-1], spec["task"]["donor_steps"]) == (3, donated, ())
    order = {"lower_order_nums": 0, "this_order": None, "timestep_list": [None, None]}
    assert spec["resume"] == {"step": 3, "numbers": order}
    assert report(await done(driver, **similar)).derived_depth == 1
    assert report(await done(driver, prompt="a red ball moving left")).decision == "miss"


async def test_a_cache_that_is_away_costs_a_job_nothing_but_the_reuse(
    driver: VideoDriver, near: Near, caplog: pytest.LogCaptureFixture
):
    near.away = True
    with caplog.at_level(logging.ERROR):
        job = await done(driver)
    assert job.state is JobState.COMPLETED
    assert (report(job).decision, str(report(job).reason)) == ("error", "index_unavailable")
    assert "away" in str(report(job).detail)
    assert "runs without the latent cache" in caplog.text


async def test_words_and_seeds_reach_the_cache(driver: VideoDriver, near: Near):
    off = await done(driver, latent_cache="off")
    assert str(report(off).reason) == "bypass_request"
    drawn = await done(driver, seed_given=False, seed=9, tenant="team", seed_policy="donor")
    assert str(report(drawn).reason) == "no_seed"
    ask = near.asked[-1]
    assert (ask.seed_given, ask.seed_policy, ask.identity.tenant, ask.job_id) == (False, "donor", "team", drawn.id)
    async with asyncio.timeout(10):
        while near.cache.stats()["entries"] != {"result": 1}:  # the drawn one's; "off" leaves nothing
            await asyncio.sleep(0.01)


async def test_without_a_cache_every_job_says_so(fake: FakeServices, jobs: Jobs):
    driver = VideoDriver([fake.services()], jobs)
    view = await driver.create(params())
    assert report(view.job).model_dump(include={"decision", "reason"}) == {"decision": "disabled", "reason": "disabled"}
    while tasks := list(driver._background._tasks):
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def test_the_text_encoder_s_vectors_travel_with_questions_and_donors(
    fake: FakeServices, jobs: Jobs, storage: Storage, tmp_path: Path
):
    settings = config(
        tmp_path / "cache",
        {"experimental": True, "embedder": {"kind": "text_encoder", "dim": 4, "fingerprint": "states"}},
    )
    served = similarity_map(tier(0.6, 3), embedder="states")
    cache = LatentCache(settings, served)
    cache.warm()
    near, vector = Near(cache), np.array([1, 0, 0, 0], np.float32)

    class Text:
        encode = fake.text.encode
        pooled = _Pooled(vector)

    services = replace(fake.services(), text_encoder=Text())
    reuse = LatentReuse(LatentPolicy(settings, SERVED, served), services, storage, near)
    job = Job(id="video_1", params=params(latent_cache="approximate"), created_at=0.0, fingerprint="f")
    assert str((await reuse.find(job)).report.reason) == "no_candidate"
    assert np.array_equal(near.asked[-1].vector, vector)
    storage.put_bytes(save_tensors({"latents": torch.zeros(SHAPE)}), donor_key(job.id, 3))
    storage.put_bytes(b"mp4", f"{job.id}/video.mp4")
    ended = job.model_copy(
        update={"state": JobState.COMPLETED, "files": {"video.mp4": 3}, "cache": CacheReport(decision="miss")}
    )
    await reuse.keep(ended, True)
    await reuse.settle()
    assert cache.stats()["entries"] == {"result": 1, "donor": 1}
    similar = job.model_copy(update={"params": params(prompt="a red ball moving left", latent_cache="approximate")})
    found = await reuse.find(similar)
    assert (found.report.level, found.resume.step if found.resume else None) == (2, 3)
    cache.close(1)


class _Pooled:
    def __init__(self, vector: np.ndarray) -> None:
        self._vector = vector

    async def remote(self, prompt: str, max_sequence_length: int) -> np.ndarray:
        return self._vector
