"""The deployments of one model without Ray: handles whose calls the test lets go on, fail or hang."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

from app.config import Topology
from app.driver.video_attempt import ModelServices
from deployments.storage import Storage
from tests.fake_jobs import card


class Call(asyncio.Future[Any]):
    """A `DeploymentResponse`."""

    cancelled_by_caller = False

    def cancel(self, msg: Any = None) -> bool:
        if not self.done():
            self.cancelled_by_caller = True
        return super().cancel(msg)


@dataclass
class Stage:
    """One deployment: by default every call succeeds at once; `hold` keeps them open, `failures` are used up first."""

    held: bool = False
    failures: list[BaseException] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    arguments: list[tuple[Any, ...]] = field(default_factory=list)

    def answer(self, arguments: tuple[Any, ...], result: Callable[[], Any]) -> Call:
        call = Call()
        self.calls.append(call)
        self.arguments.append(arguments)
        if self.failures:
            call.set_exception(self.failures.pop(0))
        elif not self.held:
            call.set_result(result())
        return call


class _Method:
    def __init__(self, remote: Callable[..., Any]) -> None:
        self.remote = remote


class FakeText:
    def __init__(self) -> None:
        self.stage = Stage()
        self.encode = _Method(
            lambda *arguments: self.stage.answer(arguments, lambda: {"blob": [b"text"], "seconds": 0.5})
        )


class FakeGang:
    """Yields the events of a gang; `gate` stops it before the step of that number, for ever if nobody sets it."""

    def __init__(self, gang: str = "g1") -> None:
        self.gang = gang
        self.gates: dict[int, asyncio.Event] = {}
        self.failures: list[tuple[int, BaseException]] = []
        """Step before which a run fails, and how; one is used up a run."""
        self.break_next: BaseException | None = None
        """What a run that waits at a gate ends with."""
        self.arguments: list[tuple[Any, ...]] = []
        self.pinned: list[str] = []
        self.cancelled: list[str] = []
        self.running: set[str] = set()
        self.generate = _Method(self._stream)

    def options(self, stream: bool, session_id: str) -> FakeGang:
        assert stream
        self.pinned.append(session_id)
        return self

    def _stream(self, key: str, *arguments: Any) -> _Events:
        self.arguments.append((key, *arguments))
        return _Events(self, key, self._events(key, *arguments))

    async def _events(
        self, key: str, spec: Any, blobs: Any, start: int, steps: int, digest: int
    ) -> AsyncIterator[dict[str, Any]]:
        failing = self.failures.pop(0) if self.failures else None
        self.running.add(key)
        try:
            yield {"kind": "accepted", "gang": self.gang}
            for step in range(start, start + steps):
                if failing is not None and step == failing[0]:
                    raise failing[1]
                if step in self.gates:
                    await self.gates[step].wait()
                    if self.break_next is not None:
                        raise self.break_next
                yield {"kind": "step", "done": step + 1}
            yield {"kind": "result", "latents": [b"latents"], "seconds": 1.0 * steps, "ranks": []}
        finally:
            self.running.discard(key)


class _Events:
    def __init__(self, gang: FakeGang, key: str, events: AsyncIterator[dict[str, Any]]) -> None:
        self._gang, self._key, self._events, self._ended = gang, key, events, False

    def __aiter__(self) -> _Events:
        return self

    async def __anext__(self) -> dict[str, Any]:
        try:
            event = await self._events.__anext__()
        except BaseException as error:
            self._ended = not isinstance(error, asyncio.CancelledError)
            raise
        self._ended = event["kind"] == "result"
        return event

    def cancel(self) -> None:
        if not self._ended:
            self._gang.cancelled.append(self._key)


class FakeDecoder:
    """Writes one byte as the video."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self.stage = Stage()
        self.decode = _Method(self._decode)

    def _decode(self, job: str, latents: Any, fps: int, outputs: Any) -> Call:
        def write() -> dict[str, Any]:
            self._storage.put_bytes(b"v", f"{job}/video.mp4")
            return {"files": {"video.mp4": 1}, "decode_s": 0.25, "encode_s": 0.125}

        return self.stage.answer((job, latents, fps, outputs), write)

    def finish(self, index: int = -1) -> None:
        """Let a held call succeed."""
        job = self.stage.arguments[index][0]
        self._storage.put_bytes(b"v", f"{job}/video.mp4")
        self.stage.calls[index].set_result({"files": {"video.mp4": 1}, "decode_s": 0.25, "encode_s": 0.125})


@dataclass
class FakeServices:
    """A model with one gang."""

    storage: Storage
    in_flight: int = 1

    def __post_init__(self) -> None:
        self.text, self.gang, self.decoder = FakeText(), FakeGang(), FakeDecoder(self.storage)

    def services(self) -> ModelServices:
        model = card("wan").model_copy(update={"topology": Topology(requests_in_flight=self.in_flight)})
        return ModelServices(
            card=model,
            scheduler="UniPCMultistepScheduler",
            scheduler_config={},
            boundary_ratio=None,
            latent_channels=16,
            vae_stride=(4, 8),
            text_encoder=self.text,
            gang=self.gang,
            decoder=self.decoder,
        )
