"""The step cache where it runs: in gangs of real processes, across topologies, with neighbours, vetoes and budgets."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.checkpoints import write_wan_checkpoint
from tests.gangs import Ask, GangSpec, StepCacheSpec, run_gang_with_reports

SHAPE = (1, 16, 2, 4, 6)
STEPS = 12
REUSE = (4, 6, 8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_wan_checkpoint(tmp_path_factory.mktemp("wan"), num_blocks=4))


@pytest.fixture(scope="module")
def text() -> dict[str, Tensor]:
    noise = torch.Generator().manual_seed(5)
    return {branch: torch.randn(1, 32, 32, generator=noise) for branch in ("positive", "negative")}


def ask(text: dict[str, Tensor], job: str, **fields) -> Ask:
    return Ask(job, text, SHAPE, **{"steps": STEPS, "reuse": REUSE, **fields})


def counts(reports: list[dict]) -> dict[tuple[int, str], tuple[int, int]]:
    """(full, reused) by rank and branch."""
    return {
        (report["rank"], branch): (count["full"], count["reuse"])
        for report in reports
        for branch, count in report["branches"].items()
    }


def test_all_topologies_skip_the_same_steps_and_stay_close(folder: str, text: dict[str, Tensor], tmp_path: Path):
    cached = {}
    for pp, cfg in [(1, 1), (1, 2), (2, 1), (2, 2)]:
        spec = GangSpec(folder, pp, cfg, step_cache=StepCacheSpec())
        latents, reports = run_gang_with_reports(spec, [[ask(text, "job")]], tmp_path)
        cached[pp, cfg] = latents["job"]
        assert set(counts(reports["job"]).values()) == {(STEPS - len(REUSE), len(REUSE))}
        assert len(counts(reports["job"])) == 2 * pp  # every stage of every branch has its counter
        assert reports["job"][0]["native"] is None
    assert torch.equal(cached[1, 1], cached[1, 2])
    assert torch.equal(cached[2, 1], cached[2, 2])
    # Two stages predict two residuals whose sum is the one of a single stage; fp32 rounds the two ways apart, and the
    # steps after a hit carry that on.  A stage that predicted from other steps would be off by orders of magnitude.
    native = run_gang_with_reports(GangSpec(folder), [[ask(text, "job", reuse=())]], tmp_path)[0]["job"]
    apart = (cached[1, 1] - cached[2, 1]).norm() / native.norm()
    moved = (cached[1, 1] - native).norm() / native.norm()
    assert moved > 1e-4
    assert apart < 1e-2 * moved


@pytest.mark.parametrize(("pp", "cfg"), [(1, 1), (2, 1)])
def test_neighbours_and_predecessors_leave_no_trace(
    folder: str, text: dict[str, Tensor], tmp_path: Path, pp: int, cfg: int
):
    spec = GangSpec(folder, pp, cfg, step_cache=StepCacheSpec())
    alone, _ = run_gang_with_reports(spec, [[ask(text, "job")]], tmp_path)
    waves = [
        [ask(text, "other", seed=4, reuse=(5, 7)), ask(text, "job")],
        [ask(text, "gone", seed=2, cancel_after=5), ask(text, "native", reuse=(), seed=3)],
        [ask(text, "again")],
    ]
    together, _ = run_gang_with_reports(spec, waves, tmp_path)
    assert torch.equal(together["job"], alone["job"])
    assert torch.equal(together["again"], alone["job"])


def test_an_empty_schedule_is_native_bit_for_bit(folder: str, text: dict[str, Tensor], tmp_path: Path):
    plain, _ = run_gang_with_reports(GangSpec(folder, 2, 1), [[ask(text, "job", reuse=())]], tmp_path)
    spec = GangSpec(folder, 2, 1, step_cache=StepCacheSpec())
    mounted, reports = run_gang_with_reports(spec, [[ask(text, "job", reuse=())]], tmp_path)
    assert torch.equal(plain["job"], mounted["job"])
    assert set(counts(reports["job"]).values()) == {(STEPS, 0)}


def test_a_request_over_the_budget_runs_native_on_every_rank_and_says_so(
    folder: str, text: dict[str, Tensor], tmp_path: Path
):
    plain, _ = run_gang_with_reports(GangSpec(folder, 2, 1), [[ask(text, "job", reuse=())]], tmp_path)
    spec = GangSpec(folder, 2, 1, step_cache=StepCacheSpec(budget_bytes=100))
    latents, reports = run_gang_with_reports(spec, [[ask(text, "job")]], tmp_path)
    assert torch.equal(plain["job"], latents["job"])
    assert reports["job"][0]["native"]["code"] == "memory"
    assert set(counts(reports["job"]).values()) == {(STEPS, 0)}


@pytest.mark.parametrize(("pp", "cfg", "trips_on"), [(1, 1, 0), (2, 1, 1), (2, 2, 3)])
def test_a_guard_that_trips_on_one_rank_makes_all_ranks_full_from_one_step_on(
    folder: str, text: dict[str, Tensor], tmp_path: Path, pp: int, cfg: int, trips_on: int
):
    # The check of full step 3 becomes known at step 5 (two steps later).  Rank 0 hears of another rank's trip a step
    # later at the earliest; hits 8 and 10 come too late to be reused, and nobody may reuse them alone.
    spec = GangSpec(folder, pp, cfg, step_cache=StepCacheSpec(trips_on=trips_on))
    latents, reports = run_gang_with_reports(spec, [[ask(text, "job", reuse=(4, 6, 8, 10))]], tmp_path)
    native = reports["job"][0]["native"]
    assert native["code"] == "error_limit"
    assert f"rank {trips_on}, step 3" in native["message"]
    reused = {reuse for _, reuse in counts(reports["job"]).values()}
    assert len(reused) == 1, "ranks reused different steps"
    done = (4, 6)[: reused.pop()]
    assert native["step"] > 5
    # From the veto on the request equals one that never planned more.
    shorter, _ = run_gang_with_reports(
        GangSpec(folder, pp, cfg, step_cache=StepCacheSpec()), [[ask(text, "job", reuse=done)]], tmp_path
    )
    assert torch.equal(latents["job"], shorter["job"])
