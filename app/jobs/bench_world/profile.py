"""What the device does while one chunk is made."""

from __future__ import annotations

from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile

from app.jobs.bench_world.lengths import PARKED, controls
from app.jobs.bench_world.stopwatch import Stopwatch
from app.jobs.local_world import LocalWorld, LocalWorldModel
from app.jobs.world_options import start_image

ROWS = 40


def profiled_chunk(model: LocalWorldModel) -> str:
    """Kernels and calls of a chunk whose window is full, those that take longest first."""
    setup = model.setup
    watch = Stopwatch(setup.device)
    world = LocalWorld(model, "profile", b"\2" * 32, start_image(setup.height, setup.width), "profile", 1)
    for chunk in range(PARKED - 1):
        world.generate(controls(chunk, model.stream.chunk))
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if setup.on_gpu else [])]
    watch.wait()
    # The work is done on the rank's own thread; torch has no public name for this switch.
    with profile(activities=activities, experimental_config=_ExperimentalConfig(profile_all_threads=True)) as trace:
        world.generate(controls(PARKED - 1, model.stream.chunk))
        watch.wait()
    by = "self_cuda_time_total" if setup.on_gpu else "self_cpu_time_total"
    return str(trace.key_averages().table(sort_by=by, row_limit=ROWS))
