"""What the device does during a piece of work."""

from __future__ import annotations

from collections.abc import Callable

from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile

from app.jobs.bench_world.stopwatch import Stopwatch

ROWS = 40


def profiled(work: Callable[[], None], watch: Stopwatch, on_gpu: bool) -> str:
    """Kernels and calls of the work in any thread of this process, those that take longest first."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    watch.wait()
    # The work is done on the rank's own thread; torch has no public name for this switch.
    with profile(activities=activities, experimental_config=_ExperimentalConfig(profile_all_threads=True)) as trace:
        work()
        watch.wait()
    by = "self_cuda_time_total" if on_gpu else "self_cpu_time_total"
    return str(trace.key_averages().table(sort_by=by, row_limit=ROWS))
