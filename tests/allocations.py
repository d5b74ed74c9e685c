"""Measures what a piece of code allocates through torch on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.profiler import ProfilerActivity, profile


def peak_bytes(run: Callable[[], Any]) -> int:
    """Most bytes that were allocated at one time beyond those that were there before; temporaries of kernels included.

    Mapped files are no allocation.
    """
    # Without a warm-up the first call would be charged with caches that outlive it.
    run()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        result = run()
    del result
    live = peak = 0
    events = [e for e in recorded.profiler.kineto_results.events() if e.name() == "[memory]"]
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak
