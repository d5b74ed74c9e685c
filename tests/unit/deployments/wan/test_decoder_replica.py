"""The decoder's replica without Ray: cancel stops the VAE, and a job is decoded once however often it is asked."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

from deployments.storage import Storage
from deployments.wan.decoder import Decoded, DecoderReplica, DecodingCancelled
from deployments.wan.memory_plan import MemoryPlan
from tests.checkpoints import write_wan_checkpoint

pytestmark = pytest.mark.anyio

LATENT_FRAMES = 21
SOON_S = 30.0


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_wan_checkpoint(tmp_path_factory.mktemp("decoder") / "checkpoint")


class Watched(DecoderReplica):
    """Counts the latent frames that the VAE has begun, and remembers how decodings ended."""

    def __init__(self, folder: Path, storage: Storage) -> None:
        super().__init__(folder, torch.float32, False, 1, MemoryPlan.__new__(MemoryPlan), storage)
        self.frames = 0
        self.ends: list[BaseException | None] = []
        self._decoder._vae.decoder.register_forward_pre_hook(self._count)

    def _count(self, *_: object) -> None:
        self.frames += 1

    def _decode(self, *arguments: object) -> Decoded:  # type: ignore[override]
        try:
            result = super()._decode(*arguments)  # type: ignore[arg-type]
        except BaseException as error:
            self.ends.append(error)
            raise
        self.ends.append(None)
        return result


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return Storage(f"{tmp_path}/results")


@pytest.fixture
async def replica(folder: Path, storage: Storage) -> AsyncIterator[Watched]:
    replica = Watched(folder, storage)
    yield replica
    replica._thread.shutdown(wait=True)


def blob(frames: int = LATENT_FRAMES) -> bytes:
    return save({"latents": torch.randn(1, 16, frames, 6, 8, generator=torch.Generator().manual_seed(0))})


async def until(condition: object) -> None:
    async with asyncio.timeout(SOON_S):
        while not condition():  # type: ignore[operator]
            await asyncio.sleep(0.001)


async def test_a_decode_writes_the_files_asked_for(replica: Watched, storage: Storage):
    decoded = await replica.decode("job", [blob(2)], 8, ("frames", "sheet"))
    assert set(decoded["files"]) == {"video.mp4", "frames.npz", "sheet.png"}
    for name, size in decoded["files"].items():
        assert storage.size(f"job/{name}") == size
    assert replica._decodings == {}


async def test_cancel_stops_at_the_next_latent_frame(replica: Watched, storage: Storage):
    call = asyncio.ensure_future(replica.decode("job", [blob()], 8, ()))
    await until(lambda: replica.frames >= 2)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await until(lambda: replica.ends)
    assert isinstance(replica.ends[0], DecodingCancelled)
    assert replica.frames < LATENT_FRAMES
    assert storage.list("job") == ()
    assert set((await replica.decode("next", [blob(2)], 8, ()))["files"]) == {"video.mp4"}


async def test_a_job_behind_another_is_cancelled_before_it_begins(replica: Watched, storage: Storage):
    first = asyncio.ensure_future(replica.decode("first", [blob()], 8, ()))
    await until(lambda: replica.frames >= 1)
    second = asyncio.ensure_future(replica.decode("second", [blob()], 8, ()))
    await asyncio.sleep(0.01)
    second.cancel()
    first.cancel()
    began = time.perf_counter()
    await until(lambda: len(replica.ends) == 2)
    assert all(isinstance(end, DecodingCancelled) for end in replica.ends)
    assert time.perf_counter() - began < SOON_S / 2
    assert storage.list("second") == ()


async def test_a_second_call_for_the_same_job_gets_the_same_outcome(replica: Watched):
    """The driver was killed and the new one asks again; the first caller's call may end at any time."""
    first = asyncio.ensure_future(replica.decode("job", [blob()], 8, ()))
    await until(lambda: replica.frames >= 1)
    second = asyncio.ensure_future(replica.decode("job", [blob()], 8, ()))
    await asyncio.sleep(0.01)
    first.cancel()
    decoded = await second
    assert set(decoded["files"]) == {"video.mp4"}
    assert replica.ends == [None]  # once
    assert replica.frames == LATENT_FRAMES


async def test_a_call_after_a_cancel_begins_anew(replica: Watched):
    first = asyncio.ensure_future(replica.decode("job", [blob()], 8, ()))
    await until(lambda: replica.frames >= 1)
    first.cancel()
    await asyncio.sleep(0.01)
    decoded = await replica.decode("job", [blob(2)], 8, ())
    assert set(decoded["files"]) == {"video.mp4"}
    assert [type(end) for end in replica.ends] == [DecodingCancelled, type(None)]
