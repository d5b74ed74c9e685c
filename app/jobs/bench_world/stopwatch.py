"""Seconds by name, of work that a device may do later than it is asked to."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Stopwatch:
    """Collects; waits for the device before and after."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.seconds: dict[str, list[float]] = {}

    @contextmanager
    def time(self, name: str) -> Iterator[None]:
        """Add what the body takes, the device's work included."""
        self.wait()
        began = time.perf_counter()
        yield
        self.wait()
        self.seconds.setdefault(name, []).append(time.perf_counter() - began)

    def wait(self) -> None:
        """Until the device of this process is idle."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
