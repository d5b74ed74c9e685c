"""`app.launch` with a small program in place of ``serve run``: real processes, locks and sockets, no Ray."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

import pytest

from app import launch
from app.launch import Launcher, LaunchError, Target

# Answers /ready with the status its config file names, as its own dashboard, after a child that will not go by itself
# has started.
STAND_IN = """
import http.server, json, pathlib, signal, subprocess, sys
port, status = pathlib.Path(sys.argv[1]).read_text().split()
if status == "exit":
    print("the reason", flush=True)
    sys.exit(3)
ignore = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); print(1, flush=True); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", ignore], stdout=subprocess.PIPE)
child.stdout.readline()
print(f"View the dashboard at \\x1b[1m\\x1b[32mhttp://127.0.0.1:{port} \\x1b[39m", flush=True)
part = {"status": "DEPLOY_FAILED", "message": "T:\\n  File \\"x.py\\"\\n    f()\\nValueError: no such\\n\\n  cure"}
applications = {"a": {"status": "DEPLOY_FAILED", "message": "Failed to update.", "deployments": {"b": part}}}
class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        ready = self.path == "/ready"
        self.send_response(503 if ready and status == "failed" else int(status) if ready else 200)
        self.end_headers()
        self.wfile.write(json.dumps({"applications": applications if status == "failed" else {}}).encode())
    def log_message(self, *args): pass
try:
    http.server.HTTPServer(("127.0.0.1", int(port)), Answer).serve_forever()
except KeyboardInterrupt:
    print("asked to end", flush=True)
"""


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def target(port: int) -> Target:
    return Target("127.0.0.1", port, "", ("m",))


@pytest.fixture
def launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Launcher]:
    monkeypatch.setattr(launch, "LEFTOVERS_S", 0.5)  # the stand-in's child never goes by itself
    launcher = Launcher(tmp_path / "run", [sys.executable, "-c", STAND_IN])
    yield launcher
    launcher.stop()


def config(tmp_path: Path, port: int, status: str) -> Path:
    path = tmp_path / "config"
    path.write_text(f"{port} {status}")
    return path


def test_stop_ends_all_that_start_began(launcher: Launcher, target: Target, tmp_path: Path) -> None:
    assert launcher.running() is None
    launcher.start(config(tmp_path, target.port, "200"), target, timeout_s=30)
    state = launcher.running()
    assert state is not None
    assert len(launch._in_session(state["pid"])) == 2  # the program and its child
    assert launcher.dashboard() == target.address
    assert launcher.stop()
    assert launch._in_session(state["pid"]) == []
    assert "asked to end" in launcher.log.read_text()  # by SIGINT: serve run shuts Serve down on it
    assert launcher.running() is None
    assert not launcher.stop()


def test_a_second_start_is_refused_and_harms_nothing(launcher: Launcher, target: Target, tmp_path: Path) -> None:
    path = config(tmp_path, target.port, "200")
    launcher.start(path, target, timeout_s=30)
    with pytest.raises(LaunchError, match=rf"{path} already runs at {target.address} \(pid \d+\); .*make stop"):
        launcher.start(path, target, timeout_s=30)
    assert launch._answers(f"{target.address}/ready")


def test_a_killed_program_counts_as_gone_and_a_start_follows(
    launcher: Launcher, target: Target, tmp_path: Path
) -> None:
    """No process id is trusted: the state file still names one."""
    path = config(tmp_path, target.port, "200")
    launcher.start(path, target, timeout_s=30)
    pid = json.loads(launcher.state.read_text())["pid"]
    child = next(member for member in launch._in_session(pid) if member != pid)
    os.kill(pid, signal.SIGKILL)
    os.kill(child, signal.SIGKILL)  # Ray's processes go with their node by themselves
    end = time.monotonic() + 10
    while launcher.running() and time.monotonic() < end:
        time.sleep(0.05)
    assert launcher.running() is None
    launcher.start(path, target, timeout_s=30)
    state = launcher.running()
    assert state is not None
    assert state["pid"] != pid


def test_an_early_end_shows_the_log_and_the_status(launcher: Launcher, target: Target, tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"(?s)last lines of .*the reason.*ended with exit status 3"):
        launcher.start(config(tmp_path, target.port, "exit"), target, timeout_s=30)


def test_a_failed_deployment_is_told_with_serves_reason(launcher: Launcher, target: Target, tmp_path: Path) -> None:
    """`serve run` itself would stay up."""
    reason = "(?s)application 'a' failed to start:\nFailed to update.\nValueError: no such\n\n  cure$"
    with pytest.raises(LaunchError, match=reason):
        launcher.start(config(tmp_path, target.port, "failed"), target, timeout_s=30)
    assert launcher.running() is None


def test_what_never_gets_ready_is_ended(launcher: Launcher, target: Target, tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="/ready did not answer 200 within 2 s"):
        launcher.start(config(tmp_path, target.port, "503"), target, timeout_s=2)
    assert launch._in_session(json.loads(launcher.state.read_text())["pid"]) == []
    assert launcher.running() is None


def test_a_taken_port_is_refused_before_anything_starts(launcher: Launcher, target: Target, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", target.port)):
        with pytest.raises(LaunchError, match=f"cannot listen on 127.0.0.1:{target.port} "):
            launcher.start(config(tmp_path, target.port, "200"), target, timeout_s=30)
        assert not launcher.state.exists()


def test_the_target_is_the_application_worldstage_builds() -> None:
    other = {"name": "other", "import_path": "other:app", "route_prefix": "/other"}
    ours = {
        "name": "worldstage",
        "import_path": "app.builder:build",
        "route_prefix": "/video/",
        "args": {"models": [{"name": "a"}, {"name": "b"}]},
    }
    target = Target.of({"http_options": {"host": "0.0.0.0", "port": 81}, "applications": [other, ours]})
    assert target == Target("0.0.0.0", 81, "/video", ("a", "b"))
    assert target.address == "http://127.0.0.1:81/video"
    assert Target.of({"http_options": {"host": "::1"}, "applications": [other]}).address == "http://[::1]:8000/other"


def test_the_printed_curl_survives_a_shell(target: Target) -> None:
    words = shlex.split(target.curl("wan-shapes"))
    assert f"{target.address}/v1/videos/sync" in words
    body = json.loads(words[words.index("-d") + 1])
    assert body == {"model": "wan-shapes", "prompt": launch.EXAMPLE_PROMPT}
    assert words[-2:] == ["-o", "video.mp4"]


def test_a_wrong_config_starts_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.yaml").write_text("http_option: {}")
    assert launch.main(["serve", "x.yaml"]) == 1
    assert not (tmp_path / ".run" / "serve.log").exists()


def test_of_a_failed_start_the_exception_is_shown_whole() -> None:
    def fail() -> None:
        raise ValueError("too big\n\nplan\n  rank 0: 3 GiB")

    try:
        fail()
    except ValueError:
        message = "Deploying app 'x' failed with exception:\n" + traceback.format_exc()
    assert launch._without_traceback(message) == "ValueError: too big\n\nplan\n  rank 0: 3 GiB"
    assert launch._without_traceback("Failed to update.\n") == "Failed to update."
