"""What a request through HTTP and Ray Serve takes beside its phases: text, denoising, decoding, writing the file."""

from __future__ import annotations

import json
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal

from app.jobs.bench.bench_request import BenchRequest
from app.jobs.served_application import get_json, served

PHASES = ("encoding", "denoising", "decoding", "file")
PORT = 8417
"""Of the benchmark's own application."""
CALL_TIMEOUT_S = 1800.0


@dataclass(frozen=True)
class OverheadRow:
    """Medians over the calls at one shape, seconds."""

    shape: str
    calls: int
    total: float
    """From sending the request to the last byte of the mp4."""
    phases: dict[str, float]
    overhead: float
    least: float
    most: float


def measure_overhead(
    folder: Path,
    requests: Sequence[BenchRequest],
    dtype: Literal["float32", "bfloat16"],
    compile_mode: Literal["none", "blocks"],
    device: Literal["cpu", "cuda"],
    repeats: int,
) -> list[OverheadRow]:
    """Serve the checkpoint on one rank, warm up at each shape, then call `2 * repeats` times, one at a time."""
    with tempfile.TemporaryDirectory(prefix="bench-serve-") as scratch:
        config = _config(folder, Path(scratch), requests, dtype, compile_mode, device)
        with served(config, print) as address:
            return [_row(address, request, 2 * repeats) for request in requests]


def _config(
    folder: Path,
    scratch: Path,
    requests: Sequence[BenchRequest],
    dtype: str,
    compile_mode: str,
    device: str,
) -> dict[str, Any]:
    shapes = [request.shape for request in requests]
    # A quarter of the card each: text encoder and decoder live beside the rank.
    gpus = 0.25 if device == "cuda" else 0
    model = {
        "name": "bench",
        "checkpoint": str(folder.resolve()),
        "dtype": dtype,
        "compile": compile_mode,
        "ranks": {"gpus": gpus},
        "text_encoder": {"gpus": gpus},
        "decoder": {"gpus": gpus},
        "defaults": {"width": shapes[0].width, "height": shapes[0].height, "num_frames": shapes[0].frames},
        "limits": {
            "max_pixels": max(shape.width * shape.height for shape in shapes),
            "max_frames": max(shape.frames for shape in shapes),
        },
    }
    jobs = {"database_url": f"sqlite:///{scratch}/jobs.db", "storage_url": f"{scratch}/results"}
    application = {"name": "bench", "import_path": "app.builder:build", "args": {"models": [model], "jobs": jobs}}
    return {"http_options": {"host": "127.0.0.1", "port": PORT}, "applications": [application]}


def _row(address: str, request: BenchRequest, calls: int) -> OverheadRow:
    _call(address, request)
    done = [_call(address, request) for _ in range(calls)]
    beside = [total - sum(phases.values()) for total, phases in done]
    return OverheadRow(
        shape=str(request.shape),
        calls=calls,
        total=median(total for total, _ in done),
        phases={name: median(phases[name] for _, phases in done) for name in PHASES},
        overhead=median(beside),
        least=min(beside),
        most=max(beside),
    )


def _call(address: str, request: BenchRequest) -> tuple[float, dict[str, float]]:
    """Seconds of one call and of its phases."""
    body = {
        "prompt": request.prompt,
        "size": f"{request.shape.width}x{request.shape.height}",
        "num_frames": request.shape.frames,
        "num_inference_steps": request.steps,
        "guidance_scale": request.guidance_scale,
        "max_sequence_length": request.max_sequence_length,
        "seed": request.seed,
    }
    call = urllib.request.Request(
        f"{address}/v1/videos/sync", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    began = time.perf_counter()
    with urllib.request.urlopen(call, timeout=CALL_TIMEOUT_S) as response:
        job = response.headers["X-Job-Id"]
        response.read()
    total = time.perf_counter() - began
    timings = get_json(f"{address}/v1/videos/{job}")["timings"]
    return total, {name: timings[name] for name in PHASES}


def format_overhead(rows: Sequence[OverheadRow]) -> str:
    """A table, medians in seconds."""
    head = "through HTTP and Serve, medians in seconds"
    lines = [
        head,
        f"{'':14}{'total':>9}" + "".join(f"{name:>11}" for name in PHASES) + f"{'overhead':>10}  (least, most)",
    ]
    for row in rows:
        phases = "".join(f"{row.phases[name]:11.3f}" for name in PHASES)
        lines.append(f"{row.shape:14}{row.total:9.3f}{phases}{row.overhead:10.4f}  ({row.least:.4f}, {row.most:.4f})")
    return "\n".join(lines)
