"""`configs/demo-caches.yaml` as it is shipped: the demo model with the step cache and the latent cache together."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.validate import read_config
from tests.latent_serving import run, settled
from tests.serving import ROOT, Serving, config, serving, wait_until

pytestmark = pytest.mark.timeout(900)  # three videos of the demo model, on a machine that may be busy
PROMPT, PARAPHRASE = "a red ball moves to the left", "a red ball glides leftwards"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """On a free port; what it reads is the repository's, what it writes is the test's."""
    shipped = read_config(ROOT / "configs" / "demo-caches.yaml")
    args = shipped["applications"][0]["args"]
    model = args["models"][0]
    model["checkpoint"] = str(ROOT / model["checkpoint"])
    model["cache_config"]["wan_profile"] = str(ROOT / model["cache_config"]["wan_profile"])
    level_2 = args["latent_cache"]["approximate"]
    level_2["similarity_map"] = str(ROOT / level_2["similarity_map"])
    with serving(config(args.pop("models"), **args), tmp_path_factory.mktemp("demo")) as served:
        yield served


@pytest.fixture
def http(served: Serving) -> Iterator[httpx.Client]:
    with served.client() as client:
        yield client


@pytest.fixture(scope="module")
def first(served: Serving) -> dict[str, Any]:
    with served.client() as client:
        job = run(client, prompt=PROMPT, seed=11)
        settled(client, "donor", 1)
    return job


def test_a_first_request_reuses_steps_and_leaves_its_latents(first: dict[str, Any]) -> None:
    assert first["status"] == "completed", first["error"]
    assert (first["cache"]["decision"], first["cache"]["reason"]) == ("miss", "no_candidate")
    assert first["cache"]["saved_steps"]
    assert first["step_cache_report"]["reuse"]
    assert first["step_cache_report"]["native"] is None


def test_the_same_request_again(http: httpx.Client, served: Serving, first: dict[str, Any]) -> None:
    times = []
    for _ in range(20):
        began = time.perf_counter()
        answer = http.post("/v1/videos", json={"prompt": PROMPT, "seed": 11})
        times.append(time.perf_counter() - began)
        job = answer.json()
        assert (job["status"], job["cache"]["level"], job["cache"]["skipped_steps"]) == ("completed", 0, 50)
    same = [http.get(f"/v1/videos/{each}/content").content for each in (first["id"], job["id"])]
    assert same[0] == same[1]
    print("level 0 over HTTP, ms:", sorted(round(t * 1000, 1) for t in times))
    assert min(times) < 0.05  # what it takes; the others share two cores with whatever else runs


def test_a_paraphrase_starts_from_the_donor_under_the_step_cache(http: httpx.Client, first: dict[str, Any]) -> None:
    job = run(http, prompt=PARAPHRASE, seed=11, latent_cache="approximate")
    report = job["cache"]
    assert (job["status"], report["decision"], report["level"]) == ("completed", "hit", 2)
    assert report["donor"].startswith("donor-")
    assert report["skipped_steps"] >= 5
    plan = http.get(f"/v1/videos/{job['id']}/plan").json()
    assert [step["index"] for step in plan["steps"]] == list(range(report["skipped_steps"], 50))
    reused = job["step_cache_report"]["reuse"]
    assert reused
    assert min(reused) >= report["skipped_steps"] + 2  # two steps of its own run before the first prediction
    ranks = job["step_cache_report"]["ranks"]
    assert {branch["full"] + branch["reuse"] for rank in ranks for branch in rank["branches"].values()} == {
        len(plan["steps"])
    }
    print("seconds of denoising:", first["timings"]["denoising"], "from the donor:", job["timings"]["denoising"])


@pytest.mark.parametrize(
    ("changes", "reason", "differs"),
    [
        ({"prompt": "a red ball moves to the right"}, "guard_terms", []),
        ({"prompt": "a blue ball moves to the left"}, "guard_terms", []),
        ({"size": "112x128"}, "incompatible", ["width", "latent_shape"]),
        ({"num_inference_steps": 40}, "incompatible", ["num_inference_steps"]),
        ({"guidance_scale": 4.0}, "incompatible", ["guidance_scale"]),
        ({"negative_prompt": "blurry"}, "incompatible", ["negative_prompt"]),
        ({"tenant": "another"}, "no_candidate", []),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_must_not_match_says_why(
    http: httpx.Client, first: dict[str, Any], changes: dict[str, Any], reason: str, differs: list[str]
) -> None:
    headers = {"X-Tenant": changes["tenant"]} if "tenant" in changes else None
    fields = {name: value for name, value in changes.items() if name != "tenant"}
    asked = {"prompt": PROMPT, "seed": 11, "latent_cache": "approximate", **fields}
    job = http.post("/v1/videos", json=asked, headers=headers).raise_for_status().json()["id"]
    wait_until(lambda: http.get(f"/v1/videos/{job}").json()["cache"] is not None, 60, "the cache's word")
    report = http.get(f"/v1/videos/{job}").json()["cache"]
    http.post(f"/v1/videos/{job}/cancel").raise_for_status()  # computing it would show nothing more
    assert (report["decision"], report["reason"], report["donor"]) == ("miss", reason, None)
    assert set(differs) <= set(report["differs"])


def test_a_job_without_it_is_untouched(http: httpx.Client, served: Serving, first: dict[str, Any]) -> None:
    job = http.post("/v1/videos", json={"prompt": PROMPT, "seed": 11, "latent_cache": "off"}).json()["id"]
    wait_until(lambda: http.get(f"/v1/videos/{job}").json()["step"] >= 1, 60, "its first step")
    shown = http.get(f"/v1/videos/{job}").json()
    http.post(f"/v1/videos/{job}/cancel").raise_for_status()
    assert (shown["cache"]["decision"], shown["cache"]["reason"]) == ("bypass", "bypass_request")
    assert not list(Path(served.folder / "worldstage-data" / "results" / job).glob("donor-*"))
