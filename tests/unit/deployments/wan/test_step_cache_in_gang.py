"""The step cache where it runs: in gangs of real processes, across topologies, with neighbours, vetoes and budgets."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from deployments.wan.solver_state import SolverState
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


@pytest.mark.parametrize(
    ("pp", "cfg", "dtype"),
    [(1, 1, torch.float32), (1, 2, torch.bfloat16), (2, 1, torch.bfloat16), (2, 2, torch.float32)],
)
def test_full_steps_of_a_cached_request_are_native_bit_for_bit(
    folder: str, text: dict[str, Tensor], tmp_path: Path, pp: int, cfg: int, dtype: torch.dtype
):
    """Steps 0 to 7 keep residuals for the hit at 8 and change no bit: solver states of both requests are equal."""
    states = tmp_path / "states"
    states.mkdir()
    spec = GangSpec(folder, pp, cfg, dtype=dtype, states=str(states), step_cache=StepCacheSpec())
    waves = [
        [ask(text, "native", reuse=(), checkpoint_every=8)],
        [ask(text, "cached", reuse=(8,), checkpoint_every=8)],
    ]
    latents, _ = run_gang_with_reports(spec, waves, tmp_path)
    native, cached = (SolverState.from_bytes((states / f"{job}-008").read_bytes()) for job in ("native", "cached"))
    assert torch.equal(cached.latents, native.latents)
    assert cached.numbers == native.numbers
    assert cached.tensors.keys() == native.tensors.keys()
    assert all(torch.equal(cached.tensors[name], native.tensors[name]) for name in native.tensors)
    assert not torch.equal(latents["cached"], latents["native"])


@pytest.mark.parametrize(("pp", "cfg"), [(1, 1), (2, 2)])
def test_another_gang_goes_on_with_a_cached_request_bit_for_bit(
    folder: str, text: dict[str, Tensor], tmp_path: Path, pp: int, cfg: int
):
    """After the loss of a gang its residuals are gone: the next one computes the two steps that hit 6 needs itself."""
    states = tmp_path / "states"
    states.mkdir()
    spec = GangSpec(folder, pp, cfg, states=str(states), step_cache=StepCacheSpec())
    whole, _ = run_gang_with_reports(spec, [[ask(text, "job", reuse=(6, 8), checkpoint_every=4)]], tmp_path)
    resume = SolverState.from_bytes((states / "job-004").read_bytes())
    fresh = GangSpec(folder, pp, cfg, step_cache=StepCacheSpec())
    later, reports = run_gang_with_reports(fresh, [[ask(text, "later", reuse=(6, 8), resume=resume)]], tmp_path)
    assert torch.equal(later["later"], whole["job"])
    assert set(counts(reports["later"]).values()) == {(STEPS - 4 - 2, 2)}


@pytest.mark.parametrize(("pp", "cfg"), [(1, 2), (2, 1), (2, 2)])
def test_guidance_and_shape_may_change_from_request_to_request(
    folder: str, text: dict[str, Tensor], tmp_path: Path, pp: int, cfg: int
):
    """Each request has another forerunner in the second gang, or none, and gives the same bits."""
    guided = ask(text, "guided")
    unguided = ask({"positive": text["positive"]}, "unguided", guidance=(1.0, 1.0))
    wide = Ask("wide", text, (1, 16, 2, 4, 8), STEPS, reuse=REUSE)
    spec = GangSpec(folder, pp, cfg, step_cache=StepCacheSpec())
    one, reports = run_gang_with_reports(
        spec, [[guided], [unguided], [wide], [replace(guided, job="guided again")]], tmp_path
    )
    other, _ = run_gang_with_reports(spec, [[wide], [unguided], [guided]], tmp_path)
    for job in ("guided", "unguided", "wide"):
        assert torch.equal(one[job], other[job]), job
    assert torch.equal(one["guided"], one["guided again"])
    hits = (STEPS - len(REUSE), len(REUSE))
    assert counts(reports["unguided"]) == {(rank, "positive"): hits for rank in range(pp)}
    assert counts(reports["guided again"]) == counts(reports["wide"]) == counts(reports["guided"])
    assert len(counts(reports["guided"])) == 2 * pp
