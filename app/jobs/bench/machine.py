"""What a measurement was made on."""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("torch", "diffusers", "transformers", "ray")


def describe_machine() -> dict[str, Any]:
    """Date (UTC), processor, GPUs and versions, as plain data."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        **{package: version(package) for package in PACKAGES},
    }


def one_line(machine: dict[str, Any]) -> str:
    """The same for a table's head."""
    where = f"{machine['processor']}, {machine['cores']} cores, {machine['threads']} torch threads"
    gpus = machine["gpus"]
    if gpus:
        where = f"{len(gpus)} x {gpus[0]}, CUDA {machine['cuda']}"
    versions = ", ".join(f"{name} {machine[name]}" for name in ("python", *PACKAGES))
    return f"{machine['date']}  {where}  {versions}"


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    names = [
        line.partition(":")[2].strip()
        for line in (cpuinfo.read_text().splitlines() if cpuinfo.exists() else [])
        if line.startswith("model name")
    ]
    return names[0] if names else platform.machine()
