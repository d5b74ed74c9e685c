"""How jobs start processes that each hold a model."""

from __future__ import annotations

import multiprocessing
from multiprocessing.context import ForkServerContext, SpawnContext


def process_context(on_gpu: bool, preload: str) -> ForkServerContext | SpawnContext:
    """On a CPU processes fork from a server that has imported the module `preload`, and torch with it, once.

    On a GPU each starts afresh: what a library does to CUDA while it is imported cannot be used after a fork.
    """
    if on_gpu:
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([preload])
    return context
