"""``python -m app.jobs.prove_world`` as a user runs it, on the small world model and a CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest


def prove(out: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "app.jobs.prove_world",
        "--random",
        "small",
        "--device",
        "cpu",
        "--out-dir",
        str(out),
    ]
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    with tempfile.TemporaryDirectory(
        prefix="ws-"
    ) as ray_folder:  # short: Ray's sockets have paths of 107 bytes at most
        return subprocess.run(
            [*command, *options],
            env=environment | {"RAY_TMPDIR": ray_folder},
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
            timeout=800,
        )


def proved(out: Path, pp: int, window: int, sink: int, *options: str) -> dict[str, object]:
    done = prove(out, "--pp", str(pp), "--window", str(window), "--sink", str(sink), *options)
    assert done.returncode == 0, done.stdout + done.stderr
    manifest: dict[str, object] = json.loads((out / "manifest.json").read_text())
    assert manifest["all_pass"] is True
    return manifest


@pytest.mark.slow
def test_a_fork_and_a_repeat_in_other_processes_have_the_bytes_of_cold_runs(tmp_path: Path) -> None:
    """Chunks of 2 latents, window 5 and sink 1: the third chunk drops half a chunk from the window."""
    short = ("--size", "16x32", "--chunk", "2", "--frame-num", "21", "--prefix-chunks", "1")
    manifest = proved(tmp_path / "out", 2, 5, 1, *short)
    results = manifest["results"]
    assert isinstance(results, dict)
    assert {tag: run["fast_forward_k"] for tag, run in results.items()} == {"A": 0, "B": 3, "C": 1, "D": 0}
    assert {tag: run["passes"] for tag, run in results.items()} == {
        "A": {"denoise": 12, "clean": 3},
        "B": {},
        "C": {"denoise": 8, "clean": 3},  # the prefix is replayed by a clean pass
        "D": {"denoise": 12, "clean": 3},
    }
    assert all(run["n_frames"] == len(run["frame_sha256"]) == 21 for run in results.values())


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("pp", [1, 2, 4])
@pytest.mark.parametrize(("window", "sink"), [(-1, 0), (6, 2), (5, 1)])
def test_every_number_of_stages_and_window(pp: int, window: int, sink: int, tmp_path: Path) -> None:
    proved(tmp_path / "out", pp, window, sink, "--size", "32x48", "--frame-num", "49", "--prefix-chunks", "2")


def test_a_fork_outside_the_frames_is_refused(tmp_path: Path) -> None:
    done = prove(tmp_path / "out", "--frame-num", "13", "--prefix-chunks", "1")
    assert done.returncode == 2
    assert "the fork needs at least 21" in done.stderr
