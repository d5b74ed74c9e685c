"""Waits for a request of a gang that runs without Ray."""

from __future__ import annotations

import threading

from torch import Tensor

from deployments.gang.conductor import Result


class WaitingListener:
    """A `Listener` whose owner sleeps until the end."""

    def __init__(self) -> None:
        self._ended = threading.Event()
        self._latents: Tensor | None = None
        self._error: BaseException | None = None

    def on_step(self, done: int) -> None:
        """Nobody watches the steps."""

    def on_result(self, result: Result, seconds: float) -> None:
        """The request is complete."""
        self._latents = result.latents
        self._ended.set()

    def on_failure(self, error: BaseException) -> None:
        """The gang broke."""
        self._error = error
        self._ended.set()

    def wait(self) -> Tensor:
        """Latents [1, C, F, H, W] fp32 on the CPU; raises what broke the gang."""
        self._ended.wait()
        if self._error is not None:
            raise self._error
        assert self._latents is not None
        return self._latents
