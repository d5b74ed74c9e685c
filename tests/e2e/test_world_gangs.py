"""Several gangs: worlds are spread over them, stay with theirs, and move when it is lost."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.e2e.worlds import ANSWER_S, Client
from tests.serving import config, serving, wait_until

PATH = [{"keys": [key]} for key in ("w", "left", "d", "s", "up", "w", "a", "right")]
WORLDS = 8


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_worlds_move_to_another_gang_when_theirs_is_lost(tmp_path: Path):
    place = {"cpus": 0.05, "threads": 1}
    model = {
        "name": "tiny",
        "checkpoint": "random:small",
        "dtype": "float32",
        "stream": {"chunk": 2, "window": 5, "sink": 1},
        "topology": {"gangs": 2},
        "ranks": place,
        "text_encoder": place,
        "decoder": {**place, "replicas": 2},
        "default_pixels": 32 * 48,
        "limits": {"max_pixels": 64 * 64, "max_chunks": 12},
    }
    with serving(config([], worlds={"models": [model]}), tmp_path) as served:
        client = Client(served)
        cold = client.cold(PATH)
        worlds = [client.open() for _ in range(WORLDS)]
        gangs = {world: client.walk(world, PATH[:2])[-1]["gang"] for world in worlds}
        stayed = {world: client.walk(world, PATH[2:4], 2)[-1]["gang"] for world in worlds}
        assert stayed == gangs
        # Eight worlds on one of two gangs by chance: once in 128.
        assert len(set(gangs.values())) == 2
        pids = served.pids("ray::ServeReplica:worldstage:tiny-gang")
        assert len(pids) == 2
        with ThreadPoolExecutor(WORLDS) as users:
            walks = [users.submit(Client(served).walk, world, PATH[4:], 4) for world in worlds]
            began = time.monotonic()
            os.kill(pids[0], signal.SIGKILL)
            moved = {world: walk.result()[-1]["gang"] for world, walk in zip(worlds, walks, strict=True)}
        print(f"\nevery world had its chunks {time.monotonic() - began:.1f} s after a gang was killed: {gangs} {moved}")
        for world in worlds:
            client.assert_equal(world, cold)
        wait_until(lambda: len(served.pids("ray::ServeReplica:worldstage:tiny-gang")) == 2, ANSWER_S, "another gang")
