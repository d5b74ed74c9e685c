"""Losses and damage under the latent cache: what is served stays right, and what was stored stays stored."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.checkpoints import write_wan_checkpoint
from tests.e2e.frames import finish, frames
from tests.latent_serving import audit, run, settled, write_map
from tests.serving import Serving, config, model, refused, serving, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # the start of a busy machine
STEPS, SKIPPED = 50, 10
ACTOR = "ray::LatentCacheHost"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """`tiny` on two stages; level-2 hits run in the shadow."""
    folder = tmp_path_factory.mktemp("faults")
    write_wan_checkpoint(folder / "checkpoint")
    tiny = model(Path("checkpoint"), topology={"pp": 2, "cfg": 1})
    tiny["defaults"]["num_inference_steps"] = STEPS
    write_map(folder / "map.json", folder / "checkpoint", tiny["defaults"], SKIPPED)
    level_2 = {"similarity_map": "map.json", "shadow_fraction": 1.0, "lookup_timeout_s": 5.0}
    cache = {"root": "cache", "budget_gib": 0.1, "approximate": level_2}
    with serving(config([tiny], latent_cache=cache), folder) as served:
        yield served


@pytest.fixture
def http(served: Serving) -> Iterator[httpx.Client]:
    with served.client() as client:
        yield client


def blobs(served: Serving, kind: str) -> list[Path]:
    """Files of the entries of a kind, manifests left out."""
    store = served.folder / "cache" / "store" / "entries"
    return [path for path in store.glob(f"*/{kind}-*/*") if path.suffix != ".json"]


def test_a_gang_killed_in_mid_run_costs_no_bit(http: httpx.Client, served: Serving) -> None:
    """Level 1 within one job: it resumes from its last saved state, and ends where an undisturbed one ends.

    Steps of the test model take a millisecond; there are so many that a kill at 3 of 5 comes in time.
    """
    steps = 1000
    asked = {"prompt": "a small blue square", "seed": 3, "num_frames": 33, "num_inference_steps": steps}
    asked["outputs"] = ["frames"]
    job = http.post("/v1/videos", json=asked).json()["id"]
    wait_until(lambda: http.get(f"/v1/videos/{job}").json()["step"] >= 600, 60, "step 600")
    served.kill("rank 1 tiny")
    done = finish(http, job)
    assert done["status"] == "completed", done["error"]
    assert done["attempt"] > 1
    assert done["cache"]["reason"] == "no_candidate"  # of the first attempt: the second one only went on
    whole = run(http, **asked, latent_cache="off")
    assert whole["attempt"] == 1
    assert (frames(http, job) == frames(http, whole["id"])).all()
    # And the resumed job's work is as good for others.
    settled(http, "state", 1)
    faster = run(http, **{**asked, "fps": 16})
    assert (faster["cache"]["level"], faster["cache"]["skipped_steps"]) == (1, steps)
    assert (frames(http, faster["id"]) == frames(http, whole["id"])).all()


def test_kill_9_of_the_actor_loses_no_committed_entry(http: httpx.Client, served: Serving) -> None:
    asked = [{"prompt": "a red circle", "seed": seed, "num_inference_steps": 4} for seed in range(4)]
    first = [run(http, **fields) for fields in asked]
    before = http.get("/v1/caches/latent").json()["entries"]
    (actor,) = served.pids(ACTOR)
    running = http.post("/v1/videos", json={"prompt": "a green ring", "seed": 8, "num_frames": 33}).json()["id"]
    os.kill(actor, signal.SIGKILL)
    # A job that meets the gap runs without the cache and says so; none fails.
    meanwhile = run(http, prompt="a yellow star", seed=2, num_inference_steps=4)
    assert meanwhile["status"] == "completed"
    assert meanwhile["cache"]["decision"] in ("error", "miss")
    assert finish(http, running)["status"] == "completed"

    def back() -> bool:
        answer = http.get("/v1/caches/latent")
        return answer.status_code == 200 and not answer.json()["warming"]

    wait_until(back, 60, "the actor to be back")
    assert served.pids(ACTOR) != [actor]
    entries = http.get("/v1/caches/latent").json()["entries"]
    assert all(entries[kind] >= count for kind, count in before.items())
    for fields, job in zip(asked, first, strict=True):
        again = run(http, **fields)
        assert (again["cache"]["level"], again["files"]) == (0, job["files"])


def test_a_flipped_byte_is_quarantined_and_the_request_computed(http: httpx.Client, served: Serving) -> None:
    asked = {"prompt": "a purple cross", "seed": 1, "num_inference_steps": 4, "outputs": ["frames"]}
    first = run(http, **asked)
    settled(http, "result", 1)
    assert run(http, **asked)["cache"]["level"] == 0
    (video,) = [p for p in blobs(served, "result") if p.name == "video.mp4" and is_of(served, p, first["id"])]
    data = bytearray(video.read_bytes())
    data[len(data) // 2] ^= 1
    video.write_bytes(data)
    state = next(p for p in blobs(served, "state") if is_of(served, p, first["id"]))
    state.write_bytes(state.read_bytes()[:-1])
    again = run(http, **asked)
    assert (again["status"], again["cache"]["decision"], again["cache"]["reason"]) == ("completed", "miss", "corrupt")
    assert (frames(http, again["id"]) == frames(http, first["id"])).all()
    lines = audit(served.folder / "cache")
    assert sum(line["event_type"] == "quarantined" for line in lines) == 2
    assert http.get("/v1/caches/latent").json()["removed"]["quarantined"] == 2
    assert run(http, **asked)["cache"]["level"] == 0  # the computed one took the damaged one's place


def is_of(served: Serving, blob: Path, job: str) -> bool:
    return job in (blob.parent / "manifest.json").read_text()


def test_a_shadow_run_serves_the_cold_video_and_measures_the_hit(http: httpx.Client, served: Serving) -> None:
    donor = {"prompt": "a red circle moves to the left", "seed": 5}
    run(http, **donor)
    settled(http, "donor", 1)
    asked = {"prompt": "a red circle moving left", "seed": 5, "outputs": ["frames"]}
    job = run(http, **asked, latent_cache="approximate")
    report = job["cache"]
    assert (report["decision"], report["level"], report["shadow"]) == ("hit", 2, True), report
    cold = run(http, **asked, latent_cache="off")
    assert (frames(http, job["id"]) == frames(http, cold["id"])).all()

    def measured() -> list[dict[str, Any]]:
        return [line for line in audit(served.folder / "cache") if line["event_type"] == "shadow_result"]

    wait_until(lambda: bool(measured()), 30, "the shadow run")
    (line,) = measured()
    assert line["job_id"] == job["id"]
    assert (line["donor"], line["skip_steps"]) == (report["donor"], SKIPPED)
    assert 0 < line["ssim"] <= 1
    results = served.folder / "worldstage-data" / "results"
    wait_until(lambda: not list(results.glob(f"{job['id']}-*")), 10, "the shadow run's files to go")


def test_a_missing_embedder_stops_the_start_with_one_sentence(tmp_path: Path, served: Serving) -> None:
    """`served` is asked for so that its checkpoint and map are there."""
    level_2 = {"similarity_map": str(served.folder / "map.json"), "embedder": {"kind": "folder", "folder": "absent"}}
    cache = {"root": "cache", "budget_gib": 0.1, "approximate": level_2}
    said = refused(config([model(served.folder / "checkpoint")], latent_cache=cache), tmp_path)
    reason = said.strip().splitlines()[-1]
    assert "latent_cache: its actor cannot start" in reason
    assert "embedder.folder: 'absent' is no folder here; name a sentence-transformers folder" in reason
