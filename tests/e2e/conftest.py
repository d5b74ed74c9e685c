"""The application most end-to-end tests share: two models on the four kinds of process that a gang can have."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from tests.checkpoints import write_wan_checkpoint
from tests.serving import Serving, config, model, serving


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``one-expert`` and ``two-experts``."""
    folder = tmp_path_factory.mktemp("checkpoints")
    write_wan_checkpoint(folder / "one-expert")
    write_wan_checkpoint(folder / "two-experts", experts=2, seed=1)
    return folder


@pytest.fixture(scope="session")
def served(checkpoints: Path) -> Iterator[Serving]:
    """`tiny`: one expert, PP1/CFG1.  `wide`: two experts, PP2/CFG2.  Paths of its config are relative."""
    models = [
        model(Path("one-expert"), "tiny"),
        model(Path("two-experts"), "wide", topology={"pp": 2, "cfg": 2}),
    ]
    with serving(config(models, jobs={"max_queued": 3}), checkpoints) as served:
        yield served


@pytest.fixture
def http(served: Serving) -> Iterator[httpx.Client]:
    """A client; afterwards no job is left running for the next test to wait behind."""
    with served.client() as client:
        yield client
        for job in client.get("/v1/videos", params={"limit": 100}).json()["data"]:
            if job["status"] in ("queued", "in_progress"):
                client.post(f"/v1/videos/{job['id']}/cancel")
        client.get("/ready").raise_for_status()


@pytest.fixture
def client(served: Serving) -> Iterator[openai.OpenAI]:
    """The official client, unchanged."""
    with openai.OpenAI(api_key="unused", base_url=f"{served.base_url}/v1") as client:
        yield client
