"""What ranks tell each other and compute when steps are reused: the same messages as ever, and no block at a hit."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.checkpoints import write_wan_checkpoint
from tests.gangs import Ask
from tests.watched_gangs import COLLECTIVES, RankRecord, RequestRecord, WatchedSpec, run_watched

SHAPE = (1, 16, 2, 4, 6)
STEPS = 12
REUSE = (4, 6, 8)
TOPOLOGIES = [(1, 1), (1, 2), (2, 1), (2, 2)]


@dataclass(frozen=True)
class Watched:
    """One gang that ran, one after the other: first, native, cached, one cancelled after step 5, and again."""

    pp: int
    cfg: int
    latents: dict[str, Tensor]
    reports: dict[str, list[dict[str, Any]]]
    ranks: list[RankRecord]

    def request(self, rank: int, job: str) -> RequestRecord:
        (found,) = (request for request in self.ranks[rank].requests if request.job == job)
        return found

    def branches(self, rank: int) -> list[str]:
        """A second chain has the negative branch to itself."""
        if self.cfg == 1:
            return ["positive", "negative"]
        return ["positive"] if rank < self.pp else ["negative"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_wan_checkpoint(tmp_path_factory.mktemp("wan"), num_blocks=4))


@pytest.fixture(scope="module", params=TOPOLOGIES, ids=lambda t: f"pp{t[0]}-cfg{t[1]}")
def gang(folder: str, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Watched:
    pp, cfg = request.param
    noise = torch.Generator().manual_seed(5)
    text = {branch: torch.randn(1, 32, 32, generator=noise) for branch in ("positive", "negative")}
    asks = [
        Ask("first", text, SHAPE, STEPS),
        Ask("native", text, SHAPE, STEPS),
        Ask("cached", text, SHAPE, STEPS, reuse=REUSE),
        Ask("gone", text, SHAPE, STEPS, reuse=REUSE, cancel_after=5),
        Ask("again", text, SHAPE, STEPS, reuse=REUSE),
    ]
    spec = WatchedSpec(folder, pp, cfg, records=str(tmp_path_factory.mktemp("records")))
    return Watched(pp, cfg, *run_watched(spec, asks, tmp_path_factory.mktemp("gang")))


def expected_messages(gang: Watched, rank: int, position: int) -> Counter[str]:
    """By hand, for one step: what is sent, received and posted, without shapes."""
    chain, stage = divmod(rank, gang.pp)
    solver = gang.pp - 1
    mine = len(gang.branches(rank))
    found: Counter[str] = Counter()
    if stage < gang.pp - 1:
        found[f"send hidden to {rank + 1}"] += mine
    if stage > 0:
        found[f"recv hidden from {rank - 1}"] += mine
    if gang.cfg == 2 and rank == solver:
        found[f"recv prediction from {2 * gang.pp - 1}"] += 1
    if chain == 1 and stage == gang.pp - 1:
        found[f"send prediction to {solver}"] += 1
    final = position == STEPS - 1
    if rank == solver and solver != 0:
        found["send latents to 0"] += 1
    if rank == solver and gang.cfg == 2 and not final:
        found[f"send latents to {gang.pp}"] += 1
    if rank == 0 and solver != 0:
        found[f"recv latents from {solver}"] += 1  # collected before the next step begins
    if chain == 1 and stage == 0 and position > 0:
        found[f"recv latents from {solver}"] += 1  # taken when the next step begins
    if final and rank != 0:
        found["post report"] += 1
    return +found


def test_a_hit_sends_and_receives_what_a_full_step_does(gang: Watched) -> None:
    for rank in range(len(gang.ranks)):
        native, cached = (gang.request(rank, job).steps for job in ("native", "cached"))
        assert [step.events for step in cached] == [step.events for step in native]
        for step in cached:
            kinds = Counter(event.split(":")[0] for event in step.events)
            assert kinds == expected_messages(gang, rank, step.position)


def test_no_rank_asks_another_whether_to_reuse(gang: Watched) -> None:
    """The control channel is counted too: no collective, and not one message more than a native request has."""
    for rank in range(len(gang.ranks)):
        native, cached = (gang.request(rank, job).distributed for job in ("native", "cached"))
        assert cached == native
        assert not set(cached) & set(COLLECTIVES)
        # A barrier ends the start of a gang: were calls not counted, it would be missing.
        assert gang.request(rank, "first").distributed.get("barrier", 0) == (len(gang.ranks) > 1)


def test_blocks_run_at_full_steps_alone_and_at_the_same_ones_everywhere(gang: Watched) -> None:
    """Warm-up, hits and cool-down are counted in steps: with one chain for both branches as with two."""
    for rank in range(len(gang.ranks)):
        branches = len(gang.branches(rank))
        for job, reused in (("native", ()), ("cached", REUSE)):
            stacks = {step.position: step.stacks for step in gang.request(rank, job).steps}
            assert stacks == {position: 0 if position in reused else branches for position in range(STEPS)}


def test_reports_name_every_rank_with_its_branches_and_hits(gang: Watched) -> None:
    reports = gang.reports["cached"]
    assert [report["rank"] for report in reports] == list(range(gang.pp * gang.cfg))
    for report in reports:
        assert report["stage"] == report["rank"] % gang.pp
        assert list(report["branches"]) == gang.branches(report["rank"])
        for counts in report["branches"].values():
            assert counts == {"full": STEPS - len(REUSE), "reuse": len(REUSE)}
    assert reports[0]["native"] is None
    for job in ("native", "cached"):
        assert torch.isfinite(gang.latents[job]).all()
    assert not torch.equal(gang.latents["native"], gang.latents["cached"])


def test_latents_are_taken_once_a_step_and_before_their_first_use(gang: Watched) -> None:
    """`collect` takes them on rank 0 after its sends of a step; the second chain when it begins the next step."""
    solver = gang.pp - 1
    for rank in range(0, len(gang.ranks), gang.pp):
        if rank == solver:
            continue  # it makes the latents itself
        steps = [[event.split(" ")[1] for event in step.events] for step in gang.request(rank, "cached").steps]
        for position, lanes in enumerate(steps):
            taken = 1 if rank == 0 or position > 0 else 0
            assert lanes.count("latents") == taken
            if rank == 0:
                assert lanes[-1] == "latents"
            elif taken:
                assert lanes[0] == "latents"


def test_nothing_is_left_of_finished_and_cancelled_requests(gang: Watched) -> None:
    assert torch.equal(gang.latents["again"], gang.latents["cached"])
    assert "gone" not in gang.latents
    for rank, record in enumerate(gang.ranks):
        assert 5 <= len(gang.request(rank, "gone").steps) < STEPS
        assert (record.unsettled, record.residual_bytes, record.open_requests) == (0, 0, 0)
