"""A world's state and a request become a `WorldPlan`: the cheapest exact way to the next chunk."""

from __future__ import annotations

from collections.abc import Sequence

from deployments.lingbot.fast_forward import ChunkCosts, cheapest_catch_up
from deployments.lingbot.stream_config import StreamConfig
from deployments.lingbot.world_plan import Pass, WorldPlan


def world_plan(
    *,
    stages: int,
    stream: StreamConfig,
    costs: ChunkCosts,
    live: int,
    kept: Sequence[bool],
    generate: int,
    fast_forward: int = 0,
) -> WorldPlan:
    """The plan that brings a world's window to its last known chunk and makes `generate` chunks after it.

    live: chunks in the window on the gang, 0 where the world is parked or on another gang.
    kept: for each known chunk, whether every stage of the gang has its keys and values.
    fast_forward: how many of the known chunks came from a cache with this request.
    """
    way = cheapest_catch_up(live, len(kept), kept, stream, costs)
    passes = [] if way.restore is None else [Pass("restore", way.restore)]
    passes += [Pass("clean", chunk) for chunk in range(way.start, way.stop)]
    for chunk in range(way.stop, way.stop + generate):
        passes += [Pass("denoise", chunk, step) for step in range(len(stream.sampler.timesteps))]
        passes.append(Pass("clean", chunk))
    return WorldPlan(stages, tuple(passes), fast_forward)
