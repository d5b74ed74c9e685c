"""The deployments of a world model without Ray: the real replicas of one rank, behind handles that a test can break."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load

from app.config import WorldLimits, WorldSessions, WorldStream, WorldTopology
from app.worlds.model_services import WorldServices
from app.worlds.world_card import WorldCard
from deployments.gang import stage_replica
from deployments.gang.rank import Rank
from deployments.lingbot.camera_path import CameraPolicy
from deployments.lingbot.checkpoint import VAE_FILE
from deployments.lingbot.sampler_tables import V1_FAST
from deployments.lingbot.stream_config import StreamConfig
from deployments.lingbot.text_replica import WorldTextReplica
from deployments.lingbot.vae_replica import WorldVaeReplica
from deployments.lingbot.world_rank import WorldRankSpec
from deployments.lingbot.world_replica import WorldReplica
from deployments.storage import Storage

STREAM = StreamConfig(2, 5, 1, V1_FAST)
LIMITS = WorldLimits(max_pixels=64 * 64, max_chunks=8, max_request_chunks=4)


class Kept:
    """What `ray.put` gives, in this process."""

    def __init__(self, value: bytes) -> None:
        self._value = value

    def __await__(self) -> Generator[Any, None, bytes]:
        yield from asyncio.sleep(0).__await__()
        return self._value


class LocalGang(WorldReplica):
    """Rank 0 of a gang of one, in this process."""

    def __init__(self, spec: WorldRankSpec, name: str) -> None:
        self._gang_id, self._rank_number, self._stopped = name, 0, False
        self._device = "CPU"
        self._rank = Rank(spec, 0, 1, None)
        self._rank.wait_ready()


@dataclass
class Handle:
    """A `DeploymentHandle`: `failures` are used up first, one a call, and a gang is another one after each; `calls`
    names what was asked."""

    make: Callable[[], Any]
    failures: list[BaseException] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    sent: list[list[str]] = field(default_factory=list)
    """Names of the tensors that went with each request to a gang."""
    hold: asyncio.Event | None = None
    """Streams wait for it before their result."""

    def __post_init__(self) -> None:
        self.replica = self.make()

    def options(self, **_: Any) -> Handle:
        return self

    def __getattr__(self, name: str) -> _Method:
        return _Method(self, name)

    def restart(self) -> None:
        """As after a kill: another replica, which remembers nothing."""
        self.replica = self.make()


class _Method:
    def __init__(self, handle: Handle, name: str) -> None:
        self._handle, self._name = handle, name

    def remote(self, *arguments: Any) -> Any:
        handle = self._handle
        handle.calls.append(self._name)
        if self._name == "generate":
            handle.sent.append(sorted(name for blob in arguments[2] for name in load(blob)))
            return _Stream(handle, arguments)
        return self._answer(arguments)

    async def _answer(self, arguments: tuple[Any, ...]) -> Any:
        if self._handle.failures and self._name != "window":
            raise self._handle.failures.pop(0)
        answer: Awaitable[Any] = getattr(self._handle.replica, self._name)(*arguments)
        return await answer


class _Stream:
    """A streaming response."""

    def __init__(self, handle: Handle, arguments: tuple[Any, ...]) -> None:
        self._handle, self._events = handle, handle.replica.generate(*arguments)

    async def __aiter__(self) -> AsyncIterator[dict[str, Any]]:
        async for event in self._events:
            if event["kind"] == "result":
                if self._handle.hold is not None:
                    await self._handle.hold.wait()
                if self._handle.failures:
                    self._handle.restart()
                    raise self._handle.failures.pop(0)
            yield event

    def cancel(self) -> None:
        pass


@dataclass
class LocalModel:
    """One model's handles and what the driver is given of them."""

    text: Handle
    vae: Handle
    gang: Handle
    services: WorldServices


def local_model(folder: Path, storage: Storage, monkeypatch: pytest.MonkeyPatch, in_flight: int = 2) -> LocalModel:
    """A model of the checkpoint in `folder` on the CPU, one thread; gangs are named g1, g2, ... as they restart."""
    fake_ray = type("FakeRay", (), {"put": staticmethod(Kept)})
    monkeypatch.setattr(stage_replica, "ray", fake_ray)
    gangs = iter(range(1, 100))
    spec = WorldRankSpec(
        folder=folder,
        support=None,
        stream=STREAM,
        camera=CameraPolicy(),
        dtype="float32",
        pp=1,
        split=None,
        backend="gloo",
        data_timeout_s=60,
        in_flight=in_flight,
        threads=1,
        on_gpu=False,
        max_worlds=2,
        window_bytes=1 << 20,
        kv_bytes=1 << 20,
    )
    text = Handle(lambda: WorldTextReplica(folder, 16, torch.float32, False, 1))
    vae = Handle(lambda: WorldVaeReplica(folder / VAE_FILE, torch.float32, False, 1, storage, 2))
    gang = Handle(lambda: LocalGang(spec, f"g{next(gangs)}"))
    card = WorldCard(
        name="small",
        created=0,
        fingerprint="f" * 64,
        dtype="float32",
        topology=WorldTopology(requests_in_flight=in_flight),
        stream=WorldStream(chunk=STREAM.chunk, window=STREAM.window, sink=STREAM.sink),
        fps=16,
        default_pixels=16 * 32,
        limits=LIMITS,
    )
    services = WorldServices(
        card=card,
        fingerprints={"transformer": "a" * 64, "vae": "b" * 64, "text_encoder": "c" * 64},
        stream=STREAM,
        camera=CameraPolicy(),
        vae_dtype="float32",
        max_prompt_tokens=16,
        sessions=WorldSessions(live=2),
        text_encoder=text,  # type: ignore[arg-type]
        vae=vae,  # type: ignore[arg-type]
        gang=gang,  # type: ignore[arg-type]
    )
    return LocalModel(text, vae, gang, services)
