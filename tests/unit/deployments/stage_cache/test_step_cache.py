"""One stage's step cache with toy blocks whose residual is known in closed form."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from deployments.plan import BRANCHES, Branch
from deployments.stage_cache.anchors import AnchorError, AnchorStore
from deployments.stage_cache.predictor import AnchorWeights, Hold, LeastSquares, Linear, PredictionError, Predictor
from deployments.stage_cache.skip_schedule import Schedule
from deployments.stage_cache.step_cache import ErrorLimits, StepCache

CPU = torch.device("cpu")
STEPS = 12
SIGMAS = tuple(1.0 - i / STEPS for i in range(STEPS + 1))
HIDDEN = (1, 2, 4)
BYTES = 32


class Blocks:
    """hidden -> hidden + value; counts its calls."""

    def __init__(self, value: float) -> None:
        self.value, self.calls = value, 0

    def __call__(self, hidden: Tensor) -> Tensor:
        self.calls += 1
        return hidden + self.value


def cache(predictor: Predictor | None = None, budget: int = 10_000, limits: ErrorLimits | None = None) -> StepCache:
    return StepCache(predictor or Hold(), AnchorStore(budget), CPU, limits)


def residual_at(step: int, branch: Branch, slope: float = 1.0) -> float:
    """Linear in the step, so linear in SIGMAS; branches differ."""
    return slope * step + (100.0 if branch == "negative" else 0.0)


def walk(stage: StepCache, request: int, slope: float = 1.0, steps: range = range(STEPS)) -> dict[str, list[float]]:
    """The added values of all steps of both branches; asks for trips as a rank would."""
    added: dict[str, list[float]] = {branch: [] for branch in BRANCHES}
    for step in steps:
        trip = stage.trip(request, step)
        if trip is not None:
            stage.veto(request, step)
        for branch in BRANCHES:
            h = torch.full(HIDDEN, 1000.0)
            out = stage.run(request, branch, step, h, Blocks(residual_at(step, branch, slope)))
            added[branch].append((out - h)[0, 0, 0].item())
    return added


def test_an_empty_schedule_is_native() -> None:
    """Checks 1, 27: mounted but every step full, the output is the very tensor the blocks returned."""
    stage = cache(Linear())
    assert stage.admit(1, Schedule(STEPS), SIGMAS, BYTES) is None
    made = []

    def blocks(hidden: Tensor) -> Tensor:
        made.append(hidden * 3)
        return made[-1]

    for step in range(STEPS):
        assert stage.run(1, "positive", step, torch.ones(HIDDEN), blocks) is made[-1]
    assert stage.report(1).reused == {}


def test_a_hit_runs_no_block() -> None:
    """Check 2: reuse on, the second call with equal input runs 0 stacks and gives the same output; off, it runs 2."""
    blocks, h = Blocks(2.0), torch.ones(HIDDEN)
    stage = cache()
    stage.admit(1, Schedule(2, (1,)), SIGMAS, BYTES)
    assert torch.equal(stage.run(1, "positive", 0, h, blocks), stage.run(1, "positive", 1, h, blocks))
    assert blocks.calls == 1
    stage.admit(2, Schedule(2), SIGMAS, BYTES)
    stage.run(2, "positive", 0, h, blocks)
    stage.run(2, "positive", 1, h, blocks)
    assert blocks.calls == 3


def test_branches_keep_their_own_residuals() -> None:
    """Check 11: residuals 2 and 10, input 1, scale 4: 11 + 4 (3 - 11) = -21 on both steps, each computed once."""
    stage = cache()
    stage.admit(1, Schedule(2, (1,)), SIGMAS, BYTES)
    blocks: dict[Branch, Blocks] = {"positive": Blocks(2.0), "negative": Blocks(10.0)}
    for step in range(2):
        positive, negative = (stage.run(1, branch, step, torch.ones(HIDDEN), blocks[branch]) for branch in BRANCHES)
        assert torch.equal(negative + 4.0 * (positive - negative), torch.full(HIDDEN, -21.0))
    assert [b.calls for b in blocks.values()] == [1, 1]
    assert stage.report(1).full == {"positive": 1, "negative": 1}
    assert stage.report(1).reused == {"positive": 1, "negative": 1}


def test_linear_follows_a_linear_residual_and_hold_lags() -> None:
    schedule = Schedule(STEPS, (4, 6, 9))
    exact = {branch: [residual_at(step, branch) for step in range(STEPS)] for branch in BRANCHES}
    stage = cache(Linear())
    stage.admit(1, schedule, SIGMAS, BYTES)
    got = walk(stage, 1)
    for branch in BRANCHES:
        assert got[branch] == pytest.approx(exact[branch], abs=1e-3)  # 1000 + 100 in fp32 is good to 6e-5
    held = cache(Hold())
    held.admit(1, schedule, SIGMAS, BYTES)
    assert walk(held, 1)["positive"][4:7] == [3.0, 5.0, 5.0]


@pytest.mark.parametrize("predictor", [Hold(), Linear()])
def test_two_stages_that_skip_together_equal_one(predictor: Predictor) -> None:
    """h + r0 + r1 = h + r, so topologies share their quality; blocks here depend on their input."""
    schedule = Schedule(STEPS, (4, 6, 9))
    whole, first, second = (cache(predictor) for _ in range(3))
    for stage in (whole, first, second):
        stage.admit(1, schedule, SIGMAS, BYTES)
    for step in range(STEPS):

        def early(hidden: Tensor, step: int = step) -> Tensor:
            return hidden + torch.sin(hidden + step)

        def late(hidden: Tensor, step: int = step) -> Tensor:
            return hidden * 1.5 - 0.1 * step

        h = torch.linspace(0.0, 1.0, 8).reshape(HIDDEN) + 0.05 * step
        one = whole.run(1, "positive", step, h, lambda x: late(early(x)))
        two = second.run(1, "positive", step, first.run(1, "positive", step, h, early), late)
        # 2e-5: the three residuals are fp32 values up to 10 that were each rounded once or twice, times weights up to 3
        torch.testing.assert_close(two, one, atol=2e-5, rtol=0)


def test_least_squares_uses_each_branch_and_both_anchor_kinds() -> None:
    rows = []
    for i, branch in enumerate(BRANCHES):
        rows.append(AnchorWeights(branch=branch, step=3, anchors=(2, 1), weights=(2.0 + i, 0.0)))
        rows.append(AnchorWeights(branch=branch, step=5, anchors=(4, 2), weights=(0.0, 3.0 + i)))
    stage = cache(LeastSquares(table=tuple(rows)))
    stage.admit(1, Schedule(STEPS, (3, 5)), SIGMAS, BYTES)
    got = walk(stage, 1)
    assert (got["positive"][3], got["positive"][5]) == (2 * 2.0, 3 * 2.0)
    assert (got["negative"][3], got["negative"][5]) == (3 * 102.0, 4 * 102.0)


def test_missing_weights_fail_at_admission_and_reserve_nothing() -> None:
    store = AnchorStore(10_000)
    stage = StepCache(LeastSquares(table=()), store, CPU)
    with pytest.raises(PredictionError, match="step 4"):
        stage.admit(1, Schedule(STEPS, (4,)), SIGMAS, BYTES)
    assert store.reserved_bytes == 0


def test_interleaved_requests_equal_lone_ones() -> None:
    """Checks 29, 9: A and B step by step on one stage, and each alone in a fresh one; also one after the other."""
    schedule = Schedule(STEPS, (4, 7))
    alone = []
    for slope in (1.0, -3.0):
        fresh = cache(Linear())
        fresh.admit(1, schedule, SIGMAS, BYTES)
        alone.append(walk(fresh, 1, slope))
    both = cache(Linear())
    both.admit(1, schedule, SIGMAS, BYTES)
    both.admit(2, schedule, SIGMAS, BYTES)
    got: list[dict[str, list[float]]] = [{b: [] for b in BRANCHES}, {b: [] for b in BRANCHES}]
    for step in range(STEPS):
        for request, slope in ((1, 1.0), (2, -3.0)):
            for branch, values in walk(both, request, slope, range(step, step + 1)).items():
                got[request - 1][branch] += values
    assert got == alone
    both.drop(1)
    both.admit(1, schedule, SIGMAS, BYTES)
    assert walk(both, 1, -3.0) == alone[1]


def test_guidance_off_between_two_guided_requests() -> None:
    """Checks 8, 21: labels, not call parity: [+, -, +, +, -] stays aligned; an unknown label is an error."""
    stage = cache()
    schedule = Schedule(2, (1,))
    stage.admit(1, schedule, SIGMAS, BYTES)
    stage.admit(2, schedule, SIGMAS, BYTES, branches=("positive",))
    calls: list[tuple[int, Branch, float]] = [(1, "positive", 1.0), (1, "negative", 2.0), (2, "positive", 5.0)]
    for request, branch, value in calls:
        stage.run(request, branch, 0, torch.zeros(HIDDEN), Blocks(value))
    for request, branch, value in reversed(calls):
        out = stage.run(request, branch, 1, torch.zeros(HIDDEN), Blocks(99.0))
        assert out[0, 0, 0].item() == value
    with pytest.raises(ValueError, match="branch: got 'uncond', expected one of"):
        stage.run(1, "uncond", 1, torch.zeros(HIDDEN), Blocks(1.0))  # type: ignore[arg-type]


def test_drop_frees_everything_and_the_next_request_is_clean() -> None:
    """Checks 9, 26: cancel in the middle; the same id admitted again has no residual of the old one."""
    store = AnchorStore(10_000)
    stage = StepCache(Linear(), store, CPU)
    stage.admit(1, Schedule(STEPS, (4, 7)), SIGMAS, BYTES)
    walk(stage, 1, steps=range(6))
    assert store.held_bytes == 4 * BYTES  # two anchors of two branches
    stage.drop(1)
    assert (store.held_bytes, store.reserved_bytes, stage.admitted(1)) == (0, 0, False)
    with pytest.raises(KeyError, match="not admitted"):
        stage.run(1, "positive", 6, torch.zeros(HIDDEN), Blocks(1.0))
    stage.admit(1, Schedule(STEPS, (4,)), SIGMAS, BYTES)
    with pytest.raises(AnchorError, match="no residual of steps"):
        stage.run(1, "positive", 4, torch.zeros(HIDDEN), Blocks(1.0))


def test_a_changed_shape_is_never_answered_with_a_residual() -> None:
    """Check 22: another resolution under the same id fails loudly."""
    stage = cache()
    stage.admit(1, Schedule(2, (1,)), SIGMAS, BYTES)
    stage.run(1, "positive", 0, torch.zeros(HIDDEN), Blocks(1.0))
    with pytest.raises(PredictionError, match="does not match hidden"):
        stage.run(1, "positive", 1, torch.zeros(1, 1, 4), Blocks(1.0))


def test_over_budget_runs_native_with_the_reason() -> None:
    stage = cache(Linear(), budget=4 * BYTES)
    assert stage.admit(1, Schedule(STEPS, (4,)), SIGMAS, BYTES) is None
    refused = stage.admit(2, Schedule(STEPS, (4,)), SIGMAS, BYTES)
    assert refused is not None
    assert refused.code == "memory"
    assert not stage.admitted(2)
    stage.drop(1)
    assert stage.admit(2, Schedule(STEPS, (4,)), SIGMAS, BYTES) is None


def test_only_needed_residuals_are_kept() -> None:
    store = AnchorStore(10_000)
    stage = StepCache(Linear(), store, CPU)
    stage.admit(1, Schedule(STEPS, (8,)), SIGMAS, BYTES)
    walk(stage, 1, steps=range(6))
    assert store.held_bytes == 0  # the anchors of step 8 are 7 and 6
    walk(stage, 1, steps=range(6, 8))
    assert store.held_bytes == 4 * BYTES


def limits(steps: range, limit: float) -> ErrorLimits:
    return {(branch, step): limit for branch in BRANCHES for step in steps}


def test_the_guard_trips_and_the_rest_is_full() -> None:
    """A bad prediction at a full step, seen two steps later, vetoes the later hits only."""
    stage = cache(Hold(), limits=limits(range(1, STEPS), 0.5))
    stage.admit(1, Schedule(STEPS, (3, 6, 9)), SIGMAS, BYTES)
    # Hold misses step 1 by |1 - 0| / 1 = 1, above the limit; step 2 by |2 - 1| / 2 = .5, at it.
    got = walk(stage, 1)["positive"]
    assert got[3] == 3.0  # a veto seen at step 3 = 1 + 2 already holds there
    assert got == [float(step) for step in range(STEPS)]
    assert stage.report(1).reused == {}


def test_a_resumed_run_is_checked_from_its_own_residuals_on() -> None:
    """Limits name steps whose anchors an earlier run computed: those are not checked, later ones are."""
    limits: ErrorLimits = {(branch, step): 1e-9 for branch in BRANCHES for step in (5, 6, 7)}
    stage = cache(Linear(), limits=limits)
    stage.admit(1, Schedule(STEPS, (11,)), SIGMAS, BYTES, start=5)
    added = walk(stage, 1, steps=range(5, STEPS))
    assert len(added["positive"]) == STEPS - 5
    tight = cache(Linear(), limits=limits)
    tight.admit(1, Schedule(STEPS, (11,)), SIGMAS, BYTES, start=5)
    for step in range(5, 8):
        for branch in BRANCHES:
            tight.run(1, branch, step, torch.full(HIDDEN, 1000.0), Blocks(step**2))
    trip = next(filter(None, (tight.trip(1, step) for step in range(8, STEPS))))
    assert trip.step == 7  # anchors 6 and 5; steps 5 and 6 lack theirs
    rows = [AnchorWeights(branch=b, step=11, anchors=(10, 9), weights=(2.0, -1.0)) for b in BRANCHES]
    tabled = cache(LeastSquares(table=tuple(rows)), limits=limits)
    # The table was made for another schedule: it has no weights for a check of step 7 with these anchors.
    assert tabled.admit(1, Schedule(STEPS, (11,)), SIGMAS, BYTES, start=5) is None
    with pytest.raises(PredictionError):
        tabled.admit(2, Schedule(STEPS, (11,)), SIGMAS, BYTES)


def test_a_quiet_guard_changes_nothing() -> None:
    schedule = Schedule(STEPS, (3, 6, 9))
    unguarded, guarded = cache(Linear()), cache(Linear(), limits=limits(range(1, STEPS), 0.5))
    unguarded.admit(1, schedule, SIGMAS, BYTES)
    guarded.admit(1, schedule, SIGMAS, BYTES)
    assert walk(unguarded, 1) == walk(guarded, 1)
    assert guarded.report(1).reused == {"positive": 3, "negative": 3}


def test_a_veto_in_the_middle_keeps_walking() -> None:
    """After a veto former hits are full and nobody asks for anchors that were not kept."""
    store = AnchorStore(10_000)
    stage = StepCache(Linear(), store, CPU, limits(range(2, STEPS), 1e9))
    stage.admit(1, Schedule(STEPS, (4, 6, 8, 10)), SIGMAS, BYTES)
    walk(stage, 1, steps=range(6))
    stage.veto(1, 6)
    walk(stage, 1, steps=range(6, STEPS))
    assert stage.report(1).reused == {"positive": 1, "negative": 1}
    assert stage.report(1).full == {"positive": STEPS - 1, "negative": STEPS - 1}
    with pytest.raises(AnchorError, match=r"no residual of steps \[9\]"):
        store.get(1, "positive", (9,))  # the vetoed hit at 10 would have needed it: nothing is computed in vain


@pytest.mark.gpu
def test_cuda_the_loop_waits_for_nothing() -> None:
    """Check 31, the stage cache's part: full steps, hits and guard checks under sync debug mode "error"."""
    device = torch.device("cuda")
    schedule = Schedule(STEPS, (4, 6, 9))

    def loop(request: int) -> Tensor:
        out = torch.zeros(1, 64, 64, device=device, dtype=torch.bfloat16)
        for step in range(STEPS):
            stage.trip(request, step)
            for branch in BRANCHES:
                out = stage.run(request, branch, step, out, lambda hidden: hidden * 1.01 + 1)
        return out

    stage = StepCache(Linear(), AnchorStore(1 << 20), device, limits(range(2, STEPS), 1e9))
    for request in (1, 2):
        stage.admit(request, schedule, SIGMAS, 64 * 64 * 2)
    warm = loop(1)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        again = loop(2)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(warm, again)
    assert stage.report(2).reused == {"positive": 3, "negative": 3}
