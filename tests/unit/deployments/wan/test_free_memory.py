"""Free host memory, on made-up /proc and /sys trees and on this machine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from deployments.wan.free_memory import free_host_memory, free_memory


def tree(root: Path, cgroup: str, files: dict[str, str]) -> Path:
    files = {"proc/meminfo": "MemTotal: 9000 kB\nMemAvailable:    8000 kB\n", "proc/self/cgroup": cgroup} | files
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return root


V2 = "sys/fs/cgroup"
V1 = "sys/fs/cgroup/memory"


@pytest.mark.parametrize(
    ("cgroup", "files", "expected"),
    [
        pytest.param("0::/\n", {}, 8000 * 1024, id="no limit"),
        pytest.param("0::/\n", {f"{V2}/memory.max": "max\n"}, 8000 * 1024, id="v2 unlimited"),
        pytest.param(
            "0::/\n",
            {
                f"{V2}/memory.max": "5000\n",
                f"{V2}/memory.current": "3000\n",
                f"{V2}/memory.stat": "anon 2000\ninactive_file 700\n",
            },
            5000 - (3000 - 700),
            id="v2, page cache given up",
        ),
        pytest.param(
            "0::/a/b\n",
            {
                f"{V2}/a/b/memory.max": "max\n",
                f"{V2}/a/memory.max": "4000\n",
                f"{V2}/a/memory.current": "5000\n",
                f"{V2}/a/memory.stat": "anon 5000\n",
            },
            0,
            id="v2, a group above is full",
        ),
        pytest.param(
            "5:devices:/\n4:cpu,memory:/hidden/by/namespace\n0::/\n",
            {
                f"{V1}/memory.limit_in_bytes": "6000\n",
                f"{V1}/memory.usage_in_bytes": "1000\n",
                f"{V1}/memory.stat": "inactive_file 9\ntotal_inactive_file 100\n",
            },
            6000 - (1000 - 100),
            id="v1",
        ),
    ],
)
def test_the_smallest_bound_counts(tmp_path: Path, cgroup: str, files: dict[str, str], expected: int) -> None:
    assert free_host_memory(tree(tmp_path, cgroup, files)) == expected


def test_a_kernel_without_the_line_is_named(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"proc/meminfo: no line MemAvailable"):
        free_host_memory(tree(tmp_path, "0::/\n", {"proc/meminfo": "MemTotal: 1 kB\n"}))


def test_this_machine_has_some() -> None:
    total = int(Path("/proc/meminfo").read_text().split()[1]) * 1024
    assert 0 < free_memory(torch.device("cpu")) < total
