"""What decides the last bits of a process's results beside the code."""

from __future__ import annotations

import torch

from deployments.lingbot.world_key import device_name


def process_name(device: torch.device, threads: int | None) -> str:
    """Kind of device; on a CPU also the number of torch threads, for they decide how sums are split.

    threads: None: torch's own choice.
    """
    if device.type == "cuda":
        return device_name(device)
    return f"{device_name(device)}, {torch.get_num_threads() if threads is None else threads} threads"
