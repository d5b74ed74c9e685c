"""Serves a config as users do (`serve run` by `app.launch`), finds its processes, and sees to it that nothing remains.

Every application has a Ray instance of its own: its temporary folder is named in the environment of all its processes,
which is also how they are found.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml

from app.launch import SERVE_RUN, Launcher, LaunchError, Target

ROOT = Path(__file__).parent.parent
START_S = 540.0
"""Half a minute on two idle cores; a machine that is busy otherwise may take ten times as long."""
GOES_S = 15.0
"""Wait for Ray's own helpers to go once the application has been stopped."""

KINDS = {
    "proxy": "ray::ProxyActor",
    "controller": "ray::ServeController",
    "ingress": "ray::ServeReplica:worldstage:ingress",
    "driver": "ray::ServeReplica:worldstage:driver",
    "world-driver": "ray::ServeReplica:worldstage:world-driver",
    "world-cache": "ray::WorldCacheHost",
}
"""Titles of the processes an application has one of; `Serving.pid` knows the others by their model."""

COMPLAINTS = re.compile(r"resource_tracker|semaphore|leaked|shared_memory", re.IGNORECASE)
"""What a log must not hold: torch or multiprocessing found something that nobody had tidied up."""


def model(checkpoint: Path, name: str = "tiny", **fields: Any) -> dict[str, Any]:
    """A model of a test checkpoint: one thread a process, so that every topology splits its sums alike."""
    place = {"cpus": 0.05, "threads": 1}
    return {
        "name": name,
        "checkpoint": str(checkpoint),
        "dtype": "float32",
        "ranks": place,
        "text_encoder": place,
        "decoder": place,
        "defaults": {
            "width": 64,
            "height": 48,
            "num_frames": 9,
            "fps": 8,
            "num_inference_steps": 4,
            "max_sequence_length": 16,
        },
        "limits": {"max_pixels": 64 * 64, "max_frames": 121, "max_steps": 1000, "max_sequence_length": 32},
        **fields,
    }


def config(models: Sequence[dict[str, Any]], **args: Any) -> dict[str, Any]:
    """A Serve config on a free port of this machine; `args` beside `models`."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    application = {
        "name": "worldstage",
        "route_prefix": "/",
        "import_path": "app.builder:build",
        "args": {"models": list(models), **args},
    }
    return {
        "proxy_location": "HeadOnly",
        "http_options": {"host": "127.0.0.1", "port": port},
        "applications": [application],
    }


@dataclass
class Serving:
    """A running application."""

    base_url: str
    folder: Path
    """Where it was started: relative paths of its config count from here."""
    ray_folder: Path
    launcher: Launcher

    def client(self) -> httpx.Client:
        """Of the application."""
        return httpx.Client(base_url=self.base_url, timeout=60)

    def pids(self, title: str) -> list[int]:
        """Its processes whose title begins so."""
        return sorted(p.pid for p in processes(self.ray_folder) if _title(p).startswith(title))

    def pid(self, kind: str) -> int:
        """Of a kind of KINDS, ``text MODEL``, ``decoder MODEL``, ``vae MODEL`` or ``rank N MODEL``."""
        pid = self.pid_or_none(kind)
        assert pid is not None, f"{kind}: no such process, or several"
        return pid

    def pid_or_none(self, kind: str) -> int | None:
        """As `pid`; None while there is none, or one that goes and one that comes."""
        if kind.startswith("rank "):
            _, rank, name = kind.split()
            living = self.pids(f"ray::ServeReplica:worldstage:{name}-gang")
            found = re.findall(rf"rank {rank} of gang \S+: process (\d+) is ready", self.logs(f"*{name}-gang*"))
            pids = [pid for pid in living if str(pid) in found]
        elif " " in kind:
            service, name = kind.split()
            pids = self.pids(f"ray::ServeReplica:worldstage:{name}-{service}")
        else:
            pids = self.pids(KINDS[kind])
        return pids[0] if len(pids) == 1 else None

    def kill(self, kind: str) -> None:
        """kill -9."""
        os.kill(self.pid(kind), signal.SIGKILL)

    def logs(self, pattern: str = "*") -> str:
        """Ray's and Serve's log files of that name, one after the other."""
        files = sorted(self.ray_folder.glob(f"ray/session_2*/logs/**/{pattern}"))
        texts = [file.read_text(errors="replace") for file in files if file.is_file()]
        assert texts, f"no log file {pattern} in {self.ray_folder}"
        return "\n".join(texts)

    def wait_ready(self, timeout_s: float = START_S) -> float:
        """Until /ready answers 200; returns the seconds that took."""
        with self.client() as client:

            def ready() -> bool:
                try:
                    return client.get("/ready").status_code == 200
                except httpx.TransportError:
                    return False

            return wait_until(ready, timeout_s, "ready")


@contextmanager
def serving(config: dict[str, Any], folder: Path) -> Iterator[Serving]:
    """The application of `config`, started in `folder`; afterwards nothing of it may remain."""
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    target = Target.of(config)
    shm = set(os.listdir("/dev/shm"))
    ray_folder = Path(tempfile.mkdtemp(prefix="ws-"))  # short: the paths of Ray's sockets are limited to 107 bytes
    launcher = Launcher(folder / "run", _command(folder, ray_folder))
    served = Serving(target.address, folder, ray_folder, launcher)
    try:
        _start(launcher, path, target)
        yield served
        launcher.stop()
        assert_nothing_remains(served, shm)
    finally:
        launcher.stop()
        for process in processes(ray_folder):
            process.kill()
        shutil.rmtree(ray_folder, ignore_errors=True)


def refused(config: dict[str, Any], folder: Path) -> str:
    """What `make serve` says about a config that must not start."""
    try:
        with serving(config, folder):
            pass
    except LaunchError as error:
        return str(error)
    raise AssertionError("the application has started")


def assert_nothing_remains(served: Serving, shm_before: set[str]) -> None:
    """No process, no shared memory, no complaint in any log."""
    wait_until(lambda: not processes(served.ray_folder), GOES_S, "every process of the application to end")

    # Other programs of the machine come and go too: theirs are in use, or gone at the next look.
    def left() -> set[str]:
        return {name for name in set(os.listdir("/dev/shm")) - shm_before if not _is_mapped(f"/dev/shm/{name}")}

    wait_until(lambda: not left(), GOES_S, f"shared memory to go: {left()}")
    for text in (served.logs(), served.launcher.log.read_text(errors="replace")):
        lines = [line for line in text.splitlines() if COMPLAINTS.search(line)]
        assert not lines, "\n".join(lines[:20])


def processes(ray_folder: Path) -> list[psutil.Process]:
    """Living processes of the application whose Ray instance lives in this folder."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("RAY_TMPDIR") == str(ray_folder) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def wait_until(condition: Callable[[], bool], timeout_s: float, what: str) -> float:
    """Poll; returns the seconds it took, or fails."""
    begin = time.monotonic()
    while not condition():
        assert time.monotonic() - begin < timeout_s, f"waited {timeout_s:g} s in vain for {what}"
        time.sleep(0.1)
    return time.monotonic() - begin


def _start(launcher: Launcher, path: Path, target: Target) -> None:
    for last in (False, False, True):
        try:
            launcher.start(path, target, START_S)
            return
        except LaunchError as error:
            # Ray gives its own node 30 s to start, whatever else the machine does meanwhile.
            if last or "node timed out during startup" not in str(error):
                raise


def _command(folder: Path, ray_folder: Path) -> list[str]:
    # `env` is replaced by `serve`: the process that is started is the one that is told to stop.
    # Ray nices its workers by 15: beside other work, a test would measure that.
    variables = [f"RAY_TMPDIR={ray_folder}", f"PYTHONPATH={ROOT}", "OMP_NUM_THREADS=1", "RAY_worker_niceness=0"]
    return ["env", "-C", str(folder), *variables, *SERVE_RUN]


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return ""


def _is_mapped(path: str) -> bool:
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            if path in maps.read_text():
                return True
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
    return False
