"""The job that makes a video a line, against a stand-in for the running application."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.jobs import generate
from tests.video_server import VideoServer


@pytest.fixture
def server() -> Iterator[VideoServer]:
    server = VideoServer()
    yield server
    server.close()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(generate, "POLL_S", 0.02)


def write_config(folder: Path, port: int) -> Path:
    config = folder / "config.yaml"
    config.write_text(f"""
http_options: {{host: 127.0.0.1, port: {port}}}
applications:
  - name: toy
    import_path: app.builder:build
    args: {{models: [{{name: toy, checkpoint: nowhere}}]}}
""")
    return config


def arguments(tmp_path: Path, server: VideoServer, prompts: str) -> list[str]:
    (tmp_path / "prompts.txt").write_text(prompts)
    config = write_config(tmp_path, server.port)
    return ["--config", str(config), "--prompts", str(tmp_path / "prompts.txt"), "--out", str(tmp_path / "out")]


def manifest(tmp_path: Path) -> list[dict]:
    return [json.loads(line) for line in (tmp_path / "out" / "manifest.jsonl").read_text().splitlines()]


def test_every_line_gets_its_video_and_a_line_in_the_manifest(tmp_path: Path, server: VideoServer):
    prompts = 'a red circle\n{"prompt": "a blue square", "seed": 7}\na red circle\n'
    assert generate.main(arguments(tmp_path, server, prompts)) == 0
    done = {entry["line"]: entry for entry in manifest(tmp_path) if entry["status"] == "completed"}
    assert sorted(done) == [1, 2, 3]  # equal lines are videos of their own
    assert len({entry["file"] for entry in done.values()}) == 3
    for entry in done.values():
        data = (tmp_path / "out" / entry["file"]).read_bytes()
        assert data == f"video of {entry['prompt']}".encode()
        assert entry["sha256"] == hashlib.sha256(data).hexdigest()
        assert entry["bytes"] == len(data)
        assert entry["params"]["num_frames"] == 17
        assert entry["timings"] == {"denoising": 1.5}
    assert done[2]["seed"] == 7
    assert not list((tmp_path / "out").glob("*.part"))


def test_a_second_run_makes_only_what_is_missing_or_changed(tmp_path: Path, server: VideoServer):
    assert generate.main(arguments(tmp_path, server, "one\ntwo\nthree\n")) == 0
    assert generate.main(arguments(tmp_path, server, "one\ntwo\nthree\n")) == 0
    assert len(server.jobs) == 3
    # A new first line moves the others: they are found again; "two" has changed.
    assert generate.main(arguments(tmp_path, server, 'zero\none\n{"prompt": "two", "seed": 1}\nthree\n')) == 0
    assert [job["prompt"] for job in server.jobs.values()][3:] == ["zero", "two"] or [
        job["prompt"] for job in server.jobs.values()
    ][3:] == ["two", "zero"]


@pytest.mark.parametrize("change", ["weights", "defaults", "damaged", "removed"])
def test_a_video_that_would_be_another_now_is_made_again(tmp_path: Path, server: VideoServer, change: str):
    run = arguments(tmp_path, server, "one\n")
    assert generate.main(run) == 0
    (video,) = (tmp_path / "out").glob("*.mp4")
    match change:
        case "weights":
            server.fingerprint = "e" * 64
        case "defaults":
            server.steps = 30
        case "damaged":
            video.write_bytes(b"half")
        case "removed":
            video.unlink()
    assert generate.main(run) == 0
    assert len(server.jobs) == 2
    assert generate.main(run) == 0
    assert len(server.jobs) == 2


def test_failures_are_told_and_tried_again_by_the_next_run(tmp_path: Path, server: VideoServer):
    run = arguments(tmp_path, server, "fail\nrefuse\nfine\n")
    assert generate.main(run) == 1
    last = {entry["line"]: entry for entry in manifest(tmp_path)}
    assert (last[1]["status"], last[1]["error"]) == ("failed", "it broke")
    assert (last[2]["status"], last[2]["error"]) == ("failed", "400: prompt: not this one")
    assert last[3]["status"] == "completed"
    assert generate.main(run) == 1
    assert [job["prompt"] for job in server.jobs.values()].count("fine") == 1
    assert [job["prompt"] for job in server.jobs.values()].count("fail") == 2


def test_a_job_that_outlived_its_run_is_followed_not_repeated(tmp_path: Path, server: VideoServer):
    run = arguments(tmp_path, server, "one\n")
    assert generate.main(run) == 0
    lines = manifest(tmp_path)
    path = tmp_path / "out" / "manifest.jsonl"
    path.write_text(json.dumps(lines[0]) + "\n" + json.dumps(lines[1])[:40])  # killed while it wrote the second
    assert generate.main(run) == 0
    assert len(server.jobs) == 1
    assert [entry["status"] for entry in manifest(tmp_path)] == ["submitted", "completed"]


def test_a_full_queue_is_waited_for(tmp_path: Path, server: VideoServer):
    server.full = 3
    assert generate.main(arguments(tmp_path, server, "one\n")) == 0


@pytest.mark.parametrize(
    ("prompts", "told"),
    [
        ("one\n\ntwo\n", "prompts.txt:2: the line is empty"),
        ("", "empty; expected a prompt a line"),
        ('{"prompt": "a", "sed": 3}\n', "sed"),
        ('{"prompt": "a", "seed": "3"}\n', "seed"),
        ('{"prompt": \n', "prompts.txt:1: the line starts as a JSON object"),
        ('fine\n{"prompt": "a", "num_frames": 18}\n', "line 2: num_frames: got 18"),
        ('{"prompt": "a", "model": "other"}\n', "line 1: model"),
    ],
)
def test_faulty_lines_stop_the_run_before_anything_is_made(
    tmp_path: Path, server: VideoServer, capsys: pytest.CaptureFixture[str], prompts: str, told: str
):
    assert generate.main(arguments(tmp_path, server, prompts)) == 2
    assert told in capsys.readouterr().err
    assert not server.jobs


def test_a_missing_prompts_file_and_a_misspelt_config_are_told(
    tmp_path: Path, server: VideoServer, capsys: pytest.CaptureFixture[str]
):
    run = arguments(tmp_path, server, "one\n")
    (tmp_path / "prompts.txt").unlink()
    assert generate.main(run) == 2
    assert "prompts.txt" in capsys.readouterr().err
    run = arguments(tmp_path, server, "one\n")
    config = tmp_path / "config.yaml"
    config.write_text(config.read_text().replace("models:", "modles:"))
    assert generate.main(run) == 2
    assert "modles" in capsys.readouterr().err


def test_another_application_at_the_address_is_no_application(
    tmp_path: Path, server: VideoServer, capsys: pytest.CaptureFixture[str]
):
    run = arguments(tmp_path, server, "one\n")
    config = tmp_path / "config.yaml"
    config.write_text(config.read_text().replace("name: toy, checkpoint", "name: mine, checkpoint"))
    assert generate.main(run) == 2
    assert "serves ['toy'], the config ['mine']" in capsys.readouterr().err


def test_two_runs_do_not_share_a_manifest(tmp_path: Path, server: VideoServer, capsys: pytest.CaptureFixture[str]):
    run = arguments(tmp_path, server, "one\n")
    with generate.Manifest(tmp_path / "out"):
        assert generate.main(run) == 2
    assert "another run writes to it" in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_cancels_what_runs_and_keeps_what_is_done(tmp_path: Path, server: VideoServer, number: int):
    run = arguments(tmp_path, server, "one\nslow\n")
    process = subprocess.Popen(
        [sys.executable, "-m", "app.jobs.generate", *run], cwd=Path(__file__).parents[4], env={**os.environ}
    )
    end = time.monotonic() + 120
    while not any(entry["status"] == "completed" for entry in _entries(tmp_path)):
        assert time.monotonic() < end
        time.sleep(0.05)
    while len(server.jobs) < 2:
        time.sleep(0.05)
    process.send_signal(number)
    assert process.wait(60) == generate.INTERRUPTED
    assert {entry["line"]: entry["status"] for entry in manifest(tmp_path)} == {1: "completed", 2: "cancelled"}
    assert {job["prompt"]: job["status"] for job in server.jobs.values()} == {"one": "completed", "slow": "cancelled"}


def _entries(tmp_path: Path) -> list[dict]:
    return manifest(tmp_path) if (tmp_path / "out" / "manifest.jsonl").exists() else []
