"""Where a measurement came from: source commit, installed packages, device."""

from __future__ import annotations

import hashlib
import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import distributions
from pathlib import Path

import torch

from deployments.stage_cache.closed import Closed, Sha256

SOURCES = ("app", "deployments", "cache_actors")


class Provenance(Closed):
    """Fields of the same names in `Evidence`."""

    source_commit: str
    environment_sha256: Sha256
    device: str
    date: str


def provenance(on_gpu: bool, source_commit: str | None) -> Provenance:
    """Of this process.  source_commit: None asks git; RuntimeError where that is no answer."""
    return Provenance(
        source_commit=source_commit or _commit(),
        environment_sha256=_environment(),
        device=torch.cuda.get_device_name(0) if on_gpu else f"CPU, {_processor()}",
        date=datetime.now(UTC).strftime("%Y-%m-%d"),
    )


def _commit() -> str:
    root = Path(__file__).parent
    try:
        head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, check=True, capture_output=True, text=True)
        changed = subprocess.run(
            ["git", "status", "--porcelain", "--", *(f":/{name}" for name in SOURCES)],
            cwd=root,
            check=True,
            capture_output=True,
            text=True,
        )
    except (OSError, subprocess.CalledProcessError) as error:
        raise RuntimeError(f"source_commit: git cannot tell ({error}); give --source-commit") from error
    return head.stdout.strip() + ("-dirty" if changed.stdout else "")


def _environment() -> str:
    names = sorted(f"{found.metadata['Name']}=={found.version}" for found in distributions())
    return hashlib.sha256("\n".join(names).encode()).hexdigest()


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
