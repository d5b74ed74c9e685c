"""Starts, stops, restarts and refusals of whole applications, each with a Ray instance of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checkpoints import write_wan_checkpoint
from tests.e2e.frames import create, finish, make
from tests.serving import config, model, refused, serving


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("start")
    write_wan_checkpoint(folder / "checkpoint")
    return folder


def start_and_stop(folder: Path, times: int) -> None:
    for number in range(times):
        application = config([model(Path("checkpoint"), topology={"pp": 1, "cfg": 2})])
        with serving(application, folder) as served, served.client() as http:
            assert finish(http, create(http, seed=number))["status"] == "completed"
        print(f"start and stop {number + 1} of {times}: nothing remains")


@pytest.mark.timeout(1200)
def test_a_stopped_application_goes_on_where_it_was(folder: Path):
    """Two starts and stops.  A job that runs at the first stop is completed after the second start."""
    application = config([model(Path("checkpoint"), topology={"pp": 1, "cfg": 2})])
    with serving(application, folder) as served, served.client() as http:
        want = make(http, seed=1, num_inference_steps=30)
        done = create(http, seed=1)
        finish(http, done)
        left = [create(http, seed=2, num_inference_steps=1000) for _ in range(3)]
    with serving(application, folder) as served, served.client() as http:
        for job in left:
            state = http.get(f"/v1/videos/{job}").json()
            assert state["status"] in ("queued", "in_progress", "completed"), state["error"]
        assert http.get(f"/v1/videos/{done}/content").status_code == 200
        assert [finish(http, job)["status"] for job in left] == ["completed"] * 3
        assert (make(http, seed=1, num_inference_steps=30) == want).all()


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_twenty_starts_and_stops_in_a_row(folder: Path):
    start_and_stop(folder, 20)


@pytest.mark.timeout(600)
def test_a_model_that_cannot_fit_is_refused_with_the_memory_plan(folder: Path):
    huge = {"max_pixels": 1 << 24, "max_frames": 4001, "max_steps": 4}
    said = refused(config([model(Path("checkpoint"), limits=huge)]), folder)
    message = said[said.rindex("failed to start") :]
    assert "GiB" in message
    assert "lower limits.max_pixels or limits.max_frames" in message


@pytest.mark.timeout(600)
def test_a_wrong_checkpoint_is_refused_with_the_missing_file(folder: Path):
    write_wan_checkpoint(folder / "torn")
    (folder / "torn" / "vae" / "config.json").unlink()
    said = refused(config([model(Path("torn"))]), folder)
    message = said[said.rindex("failed to start") :]
    assert "vae/config.json" in message
