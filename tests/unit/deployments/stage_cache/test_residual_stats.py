"""Which pairs are recorded, and that their numbers are what they say."""

from __future__ import annotations

import pytest
import torch

from deployments.plan import BRANCHES
from deployments.stage_cache.residual_stats import Anchored, ResidualCollector, Transition


def collect(steps: int, seed: int = 0, stage: int = 0) -> tuple[list[Transition], list[Anchored]]:
    g = torch.Generator().manual_seed(seed)
    collector = ResidualCollector(stage)
    for step in range(steps):
        for branch in BRANCHES:
            collector.add(branch, step, torch.randn(1, 3, 4, generator=g))
    return collector.finish()


def test_pairs_are_local_to_their_branch() -> None:
    """Check 5: N steps give 2 (N - 1) pairs, never 2 N - 1: the negative side's first step follows nothing."""
    transitions, anchored = collect(6)
    assert len(transitions) == 2 * 5
    assert {row.step for row in transitions} == set(range(1, 6))
    # (i-1, i-2) from step 2 on: 4; (i-1, i-3) and (i-2, i-3) from step 3 on: 3 each
    assert len(anchored) == 2 * (4 + 3 + 3)
    assert {row.anchors for row in anchored if row.step == 5} == {(4, 3), (4, 2), (3, 2)}


def test_pairs_are_local_to_their_request() -> None:
    """Check 5: a second request interleaved with the first changes none of its rows."""
    g = [torch.Generator().manual_seed(seed) for seed in (0, 1)]
    both = [ResidualCollector(0), ResidualCollector(0)]
    for step in range(4):
        for one, generator in zip(both, g, strict=True):
            for branch in BRANCHES:
                one.add(branch, step, torch.randn(1, 3, 4, generator=generator))
    assert both[0].finish() == collect(4, seed=0)
    assert both[1].finish() == collect(4, seed=1)


def test_the_calibration_count() -> None:
    """Check 6: 24 prompts x 2 seeds x 49 transitions x 2 branches = 4,704 pairs a stage."""
    rows = 0
    for _ in range(24 * 2):
        collector = ResidualCollector(0)
        for step in range(50):
            for branch in BRANCHES:
                collector.add(branch, step, torch.ones(1, 1, 1))
        rows += len(collector.finish()[0])
    assert rows == 4704


def test_an_unlabelled_branch_is_an_error() -> None:
    """Check 5."""
    with pytest.raises(ValueError, match="branch: got None"):
        ResidualCollector(0).add(None, 0, torch.ones(1, 1, 1))  # type: ignore[arg-type]


def test_a_missing_step_is_an_error() -> None:
    collector = ResidualCollector(0)
    collector.add("positive", 0, torch.ones(1, 1, 1))
    with pytest.raises(ValueError, match="got 2 after 0"):
        collector.add("positive", 2, torch.ones(1, 1, 1))


def test_change_and_ratio_by_hand() -> None:
    collector = ResidualCollector(1)
    collector.add("positive", 0, torch.tensor([[[3.0, 4.0], [0.0, 1.0]]]))
    collector.add("positive", 1, torch.tensor([[[6.0, 8.0], [0.0, 1.0]]]))
    ((row,), _) = collector.finish()
    assert (row.stage, row.branch, row.step) == (1, "positive", 1)
    assert row.change == 7 / 8  # (3 + 4 + 0 + 0) / (3 + 4 + 0 + 1)
    assert row.ratio == 1.5  # mean of 10/5 and 1/1


def test_products_give_the_error_of_any_weights() -> None:
    """Oracle: |r - w1 ra - w2 rb| / |r| computed in fp64 on the tensors themselves."""
    g = torch.Generator().manual_seed(3)
    base = torch.randn(1, 8, 4, generator=g)
    residuals = [base + 0.01 * torch.randn(1, 8, 4, generator=g) for _ in range(4)]  # nearly parallel, as in a model
    collector = ResidualCollector(0)
    for step, added in enumerate(residuals):
        collector.add("negative", step, added)
    for row in collector.finish()[1]:
        r, ra, rb = (residuals[i].double() for i in (row.step, *row.anchors))
        for w1, w2 in ((1.0, 0.0), (2.0, -1.0), (1.3, -0.31)):
            exact = ((r - w1 * ra - w2 * rb).norm() / r.norm()).item()
            # 1e-4: differences of fp32 values near 1 are good to 1e-7, and they are about 1e-2
            assert row.error((w1, w2)) == pytest.approx(exact, rel=1e-4)
