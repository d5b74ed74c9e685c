"""`make serve` and `make stop`: ``serve run`` in the background, and its end.

``serve run`` gets a Ray instance of its own (``--address local``) and a session of its own, so that its end takes
every process along and touches no other Ray on the machine, as ``ray stop`` would.  Whether it runs is told by a lock,
not by a process id, which could be another's by now: it inherits a descriptor of `serve.lock`, whose lock is free
exactly when that process is gone, however it ended.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import dropwhile
from pathlib import Path
from typing import Any

from app import validate

EXAMPLE_WORLD = "a stone hall with a red square"
EXAMPLE_IMAGE = "configs/demo-world.png"
EXAMPLE_PROMPT = "a large red circle moving right on a navy background"
LOG_LINES = 40
GRACE_S = 60.0
"""Longest wait for replicas to finish their work (Serve's shutdown) before the processes are ended without asking."""
LEFTOVERS_S = 10.0
"""Wait for Ray's agents after that: within seconds they notice that their node is gone."""
SERVE_RUN = (str(Path(sys.executable).with_name("serve")), "run", "--address", "local")


class LaunchError(RuntimeError):
    """The application could not be started; the message says why."""


@dataclass(frozen=True)
class Target:
    """Where the application of a config file will answer."""

    host: str
    port: int
    prefix: str
    """Route prefix without the closing slash: empty for "/"."""
    models: tuple[str, ...]
    worlds: tuple[str, ...] = ()
    """Names of world models."""

    @classmethod
    def of(cls, config: dict[str, Any]) -> Target:
        """Of a config `app.validate` finds nothing against: its application built by worldstage, else the first one."""
        http, applications = config["http_options"], config["applications"]
        ours = [application for application in applications if application["import_path"] == validate.BUILDER]
        application = (ours or applications)[0]
        args = application.get("args", {}) if ours else {}
        models = tuple(model["name"] for model in args.get("models") or ())
        worlds = tuple(model["name"] for model in (args.get("worlds") or {}).get("models", ()))
        prefix = application.get("route_prefix", "/").rstrip("/")
        return cls(http["host"], http.get("port", 8000), prefix, models, worlds)

    @property
    def address(self) -> str:
        """URL for a client on this machine."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        host = f"[{host}]" if ":" in host else host
        return f"http://{host}:{self.port}{self.prefix}"

    def curl(self, model: str) -> str:
        """A command that makes a video and waits for it."""
        body = shlex.quote(json.dumps({"model": model, "prompt": EXAMPLE_PROMPT}))
        json_type = "-H 'Content-Type: application/json'"
        return f"curl -sS --fail-with-body {self.address}/v1/videos/sync {json_type} -d {body} -o video.mp4"

    def world_curl(self, model: str) -> str:
        """Commands that open a world, move through it and fetch the frames as a file."""
        worlds = f"{self.address}/v1/worlds"
        fields = f"-F model={shlex.quote(model)} -F prompt={shlex.quote(EXAMPLE_WORLD)} -F image=@{EXAMPLE_IMAGE}"
        body = shlex.quote(json.dumps({"keys": ["w", "left"], "chunks": 3}))
        return (
            f"WORLD=$(curl -sS --fail-with-body {worlds} {fields} | python3 -c 'import json, sys; "
            'print(json.load(sys.stdin)["id"])\')\n'
            f"curl -sS --fail-with-body {worlds}/$WORLD/chunks -H 'Content-Type: application/json' -d {body}\n"
            f"curl -sS --fail-with-body {worlds}/$WORLD/content -o world.mp4"
        )


class Launcher:
    """Starts and ends one application; `run_dir` keeps the lock, the log and who was started."""

    def __init__(self, run_dir: Path, command: Sequence[str] = SERVE_RUN) -> None:
        self.lock, self.log, self.state = (run_dir / name for name in ("serve.lock", "serve.log", "serve.json"))
        self.command = command
        run_dir.mkdir(parents=True, exist_ok=True)

    def running(self) -> dict[str, Any] | None:
        """What runs: its `pid`, which is also its session, `config` and `address`; None if nothing does."""
        with self.lock.open("a") as lock:
            return None if _try_lock(lock.fileno()) else self._read_state()

    def start(self, config: Path, target: Target, timeout_s: float) -> None:
        """Starts `config` and returns once it is ready.  Raises `LaunchError`, leaving nothing behind."""
        with self.lock.open("a") as lock:
            if not _try_lock(lock.fileno()):
                other = self._read_state()
                where = f"{other['config']} already runs at {other['address']} (pid {other['pid']})"
                raise LaunchError(f"{where}; end it with `make stop`")
            self.state.unlink(missing_ok=True)
            _require_free(target.host, target.port)
            # An ignored SIGINT, as in a script's background, would be inherited, and with it `stop` would not be heard.
            signal.signal(signal.SIGINT, signal.default_int_handler)
            with self.log.open("w") as log:
                process = subprocess.Popen(
                    [*self.command, str(config)],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=_environment(),
                    pass_fds=[lock.fileno()],
                    start_new_session=True,
                )
            self._write_state({"pid": process.pid, "config": str(config), "address": target.address})
        try:
            self._wait_until_ready(process, target, timeout_s)
        except BaseException:  # Ctrl-C too
            self._end(process.pid)
            raise

    def stop(self) -> bool:
        """Ends what `start` started and everything it started in turn; False if nothing ran."""
        running = self.running()
        if running is not None:
            self._end(running["pid"])
        return running is not None

    def dashboard(self) -> str | None:
        """Address of Ray's dashboard and job server, once the log names it."""
        found = re.search(r"View the dashboard at (http://\S+)", self._read_log())
        return found[1] if found else None

    def _read_log(self) -> str:
        return re.sub(r"\x1b\[[0-9;]*m", "", self.log.read_text(errors="replace"))  # without colours

    def _write_state(self, state: dict[str, Any]) -> None:
        whole = self.state.with_suffix(".tmp")
        whole.write_text(json.dumps(state))
        whole.rename(self.state)

    def _read_state(self) -> dict[str, Any]:
        _wait_until(self.state.exists, 5)  # the holder of the lock writes it right after the start of its process
        state: dict[str, Any] = json.loads(self.state.read_text())
        return state

    def _failure(self, reason: str) -> LaunchError:
        tail = "\n".join(self._read_log().splitlines()[-LOG_LINES:])
        return LaunchError(f"last lines of {self.log}:\n{tail}\n\n{reason}")

    def _wait_until_ready(self, process: subprocess.Popen[bytes], target: Target, timeout_s: float) -> None:
        begin = report = time.monotonic()
        while not _answers(f"{target.address}/ready"):
            if process.poll() is not None:
                raise self._failure(f"`serve run` ended with exit status {process.returncode}")
            now = time.monotonic()
            if now - begin > timeout_s:
                raise self._failure(f"{target.address}/ready did not answer 200 within {timeout_s:g} s")
            if now - report > 10:
                report = now
                print(f"  still starting ({now - begin:.0f} s)", flush=True)
            self._raise_if_failed()
            time.sleep(1)

    def _raise_if_failed(self) -> None:
        """Serve keeps running after an application has failed to start: only its status tells."""
        dashboard = self.dashboard()
        if dashboard is None:
            return
        request = urllib.request.Request(f"{dashboard}/api/serve/applications/")
        request.add_header("Authorization", f"Bearer {_ray_token()}")
        try:
            with urllib.request.urlopen(request, timeout=5) as response:
                applications = json.load(response)["applications"]
        except OSError:
            return  # the dashboard is not up yet
        for name, application in applications.items():
            if application["status"] == "DEPLOY_FAILED":
                said = [application["message"], *(part["message"] for part in application["deployments"].values())]
                reasons = [_without_traceback(message) for message in said if message]
                raise self._failure("\n".join([f"application {name!r} failed to start:", *reasons]))

    def _end(self, pid: int) -> None:
        """Asks `serve run` to shut down, then ends what is left of its session."""
        for number, patience_s in ((signal.SIGINT, GRACE_S), (signal.SIGTERM, 10.0)):
            _signal(_in_session(pid, leader_only=True), number)
            if _wait_until(lambda: not _in_session(pid, leader_only=True), patience_s):
                break
        if not _wait_until(lambda: not _in_session(pid), LEFTOVERS_S):
            _signal(_in_session(pid), signal.SIGKILL)
            _wait_until(lambda: not _in_session(pid), LEFTOVERS_S)


def _environment() -> dict[str, str]:
    """Ray's settings: no other cluster, no usage statistics, and a token for the job server, which runs any code.

    Ray 2.60 asks for the token anyway in a cluster of its own, but its client sends it only if the mode is set.
    This environment's programs come first, so that the `python` of a submitted job is the one that has our packages.
    """
    inherited = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    # A dead proxy is replaced after three failed checks: within 6 s instead of Serve's 30.
    defaults = {"RAY_AUTH_MODE": "token", "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "2"}
    return defaults | inherited | {"RAY_USAGE_STATS_ENABLED": "0", "PATH": path}


def _ray_token() -> str:
    """From where Ray itself reads it; empty if there is none, as in a mode without tokens."""
    path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH", Path.home() / ".ray" / "auth_token"))
    return os.environ.get("RAY_AUTH_TOKEN") or (path.read_text().strip() if path.exists() else "")


def _without_traceback(message: str) -> str:
    """The exception's own lines, which stand behind the last frame (``  File ...``) and its indented source lines."""
    lines = message.strip().splitlines()
    frames = [number for number, line in enumerate(lines) if line.startswith('  File "')]
    rest = lines[frames[-1] :] if frames else lines
    return "\n".join(dropwhile(lambda line: line.startswith(" "), rest))


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _require_free(host: str, port: int) -> None:
    """Otherwise another's answer to /ready would be taken for ours."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            reason = f"cannot listen on {host}:{port} ({error.strerror})"
            raise LaunchError(f"http_options: {reason}; end what uses it or choose another port") from error


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return bool(response.status == 200)
    except OSError:  # urllib's errors, refused connections and answers other than 2xx among them
        return False


def _in_session(leader: int, leader_only: bool = False) -> list[int]:
    """Living processes of the session that process `leader` began, read from /proc."""
    found = []
    for stat in Path("/proc").glob(f"{leader if leader_only else '[0-9]*'}/stat"):
        try:
            state, _parent, _group, session = stat.read_text().rpartition(")")[2].split()[:4]
        except (FileNotFoundError, ProcessLookupError):
            continue  # ended meanwhile
        if int(session) == leader and state != "Z":
            found.append(int(stat.parent.name))
    return found


def _signal(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):  # ended meanwhile
            os.kill(pid, number)


def _wait_until(condition: Callable[[], bool], patience_s: float) -> bool:
    end = time.monotonic() + patience_s
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True


def _serve(launcher: Launcher, config: Path, timeout_s: float) -> int:
    if validate.main([str(config)]) != 0:
        return 1
    target = Target.of(validate.read_config(config))
    print(f"starting {config}, log in {launcher.log}", flush=True)
    try:
        launcher.start(config, target, timeout_s)
    except LaunchError as error:
        print(f"{error}\n\n{config} is not served", file=sys.stderr)
        return 1
    print(f"\nready:  {target.address}")
    print(f"jobs:   RAY_AUTH_MODE=token .venv/bin/ray job submit --address {launcher.dashboard()} ...")
    print("end:    make stop")
    for model in target.models:
        print(f"\n{target.curl(model)}")
    for model in target.worlds:
        print(f"\n{target.world_curl(model)}")
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0 once the application is ready, or has ended; 1 if it cannot start."""
    parser = argparse.ArgumentParser(prog="python -m app.launch", description="Serve in the background.")
    commands = parser.add_subparsers(dest="command", required=True)
    serve = commands.add_parser("serve", help="start and wait until ready")
    serve.add_argument("config", type=Path)
    serve.add_argument("--timeout-s", type=float, default=900, help="longest wait for /ready (default: %(default)s)")
    commands.add_parser("stop", help="end what `serve` started")
    parsed = parser.parse_args(arguments)
    launcher = Launcher(Path(".run"))
    if parsed.command == "serve":
        try:
            return _serve(launcher, parsed.config, parsed.timeout_s)
        except KeyboardInterrupt:
            print("interrupted; everything started was ended", file=sys.stderr)
            return 130
    print("stopped" if launcher.stop() else "nothing runs")
    return 0


if __name__ == "__main__":
    sys.exit(main())
