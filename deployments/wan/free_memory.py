"""How much memory a process can still take on its device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True)
class _Controller:
    """File names of one version of Linux's memory controller."""

    limit: str
    usage: str
    reclaimable: str
    """Line of memory.stat: page cache that counts as used and is given up under pressure."""


V1 = _Controller("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
V2 = _Controller("memory.max", "memory.current", "inactive_file")


def free_memory(device: torch.device) -> int:
    """Bytes that this process can still allocate: on a GPU what its driver calls free, on a CPU `free_host_memory`."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return free_host_memory()


def free_host_memory(root: Path = Path("/")) -> int:
    """The least of what the machine has available and what each control group of this process leaves (Linux).

    root: where /proc and /sys are.
    """
    bounds = [_available_on_machine(root / "proc/meminfo")]
    for group, controller in _groups(root):
        limit = (group / controller.limit).read_text().strip()
        if limit != "max":
            used = int((group / controller.usage).read_text()) - _stat(group / "memory.stat", controller.reclaimable)
            bounds.append(max(0, int(limit) - used))
    return min(bounds)


def _available_on_machine(meminfo: Path) -> int:
    for line in meminfo.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"{meminfo}: no line MemAvailable, which Linux has since 3.14")


def _groups(root: Path) -> Iterator[tuple[Path, _Controller]]:
    """Control groups that may bound this process, from its own up; in a container those above may not be visible."""
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        number, names, path = line.split(":", 2)
        if number == "0":
            top, controller = root / "sys/fs/cgroup", V2
        elif "memory" in names.split(","):
            top, controller = root / "sys/fs/cgroup/memory", V1
        else:
            continue
        group = top / path.lstrip("/")
        while group.is_relative_to(top):
            if (group / controller.limit).exists():
                yield group, controller
            group = group.parent


def _stat(file: Path, key: str) -> int:
    for line in file.read_text().splitlines():
        name, value = line.split()
        if name == key:
            return int(value)
    return 0
