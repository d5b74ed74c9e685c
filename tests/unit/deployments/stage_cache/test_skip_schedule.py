"""Schedules against hand-made numbers and an independent transcription of the official rule."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deployments.stage_cache.coefficients import PUBLISHED, Signal
from deployments.stage_cache.skip_schedule import (
    Schedule,
    ScheduleError,
    SkipLimits,
    StageRule,
    magcache_schedule,
    polynomial,
    teacache_schedule,
)
from deployments.stage_cache.timestep_signal import Linear, TimeEmbedder, relative_changes

FREE = SkipLimits(warmup_steps=1, cooldown_steps=1, max_consecutive=100, min_anchors=1)
"""The official bounds of e mode: the first and the last step are full."""


def constant(value: float, input_range: tuple[float, float] | None = None) -> StageRule:
    """P(d) = value for every d."""
    return StageRule((0.0, 0.0, 0.0, 0.0, value), input_range)


def identity(input_range: tuple[float, float] | None = None) -> StageRule:
    """P(d) = d."""
    return StageRule((0.0, 0.0, 0.0, 1.0, 0.0), input_range)


class OfficialTeaCache:
    """ali-vilab/TeaCache, TeaCache4Wan2.1/teacache_generate.py, `teacache_forward`: two calls a step, told apart by the
    parity of a call counter, doubled bounds, no clamp, no range guard.  Oracle only."""

    def __init__(self, steps: int, signal: Signal, coefficients: tuple[float, ...], threshold: float) -> None:
        self.rescale = np.poly1d(coefficients)
        self.threshold = threshold
        self.ret_steps = 5 * 2 if signal == "e0" else 1 * 2
        self.cutoff_steps = steps * 2 if signal == "e0" else steps * 2 - 2
        self.cnt = 0
        self.previous: list[torch.Tensor | None] = [None, None]
        self.accumulated = [0.0, 0.0]

    def call(self, modulated: torch.Tensor) -> bool:
        """Whether this call computes."""
        side = self.cnt % 2
        if self.cnt < self.ret_steps or self.cnt >= self.cutoff_steps:
            should_calc = True
            self.accumulated[side] = 0
        else:
            before = self.previous[side]
            assert before is not None
            distance = ((modulated - before).abs().mean() / before.abs().mean()).cpu().item()
            self.accumulated[side] += self.rescale(distance)
            should_calc = not self.accumulated[side] < self.threshold
            if should_calc:
                self.accumulated[side] = 0
        self.previous[side] = modulated.clone()
        self.cnt += 1
        return should_calc


def embedder(scale: float) -> TimeEmbedder:
    """Random weights; `scale` of the second bias sets the size of d without changing the signal's path."""
    g = torch.Generator().manual_seed(0)

    def layer(out: int, inp: int, bias: float) -> Linear:
        return Linear(torch.randn(out, inp, generator=g) / inp**0.5, bias * torch.randn(out, generator=g))

    return TimeEmbedder(layer(96, 64, 0.1), layer(96, 96, scale), layer(6 * 96, 96, 0.3))


def timesteps(steps: int = 50, shift: float = 5.0) -> list[float]:
    s = np.linspace(1, 0, steps + 1)[:-1]
    return [float(int(1000 * x)) for x in shift * s / (1 + (shift - 1) * s)]


@pytest.mark.parametrize("signal", ["e", "e0"])
@pytest.mark.parametrize("threshold", [0.05, 0.08])
@pytest.mark.parametrize("scale", [0.3, 1.0, 3.0])
def test_equals_the_official_rule(signal: Signal, threshold: float, scale: float) -> None:
    """Check 28: host schedule = torch reference, 50 steps, both signals; both branches of the reference agree."""
    coefficients = PUBLISHED["t2v-1.3b", signal]
    values = embedder(scale).signal(signal, timesteps())
    reference = OfficialTeaCache(50, signal, coefficients, threshold)
    computed = [(reference.call(m), reference.call(m)) for m in values]
    assert all(positive == negative for positive, negative in computed)

    warmup, cooldown = (5, 0) if signal == "e0" else (1, 1)
    limits = SkipLimits(warmup_steps=warmup, cooldown_steps=cooldown, max_consecutive=50, min_anchors=1)
    planned = teacache_schedule(
        relative_changes(values), [StageRule(coefficients, None)], threshold, limits, clamp=False
    )
    assert planned.schedule.reuse == tuple(i for i, (full, _) in enumerate(computed) if not full)


def test_the_reference_comparison_sees_hits_and_full_steps() -> None:
    """Without both kinds the comparison above would prove nothing."""
    counts = {
        len(
            teacache_schedule(
                relative_changes(embedder(scale).signal(signal, timesteps())),
                [StageRule(PUBLISHED["t2v-1.3b", signal], None)],
                0.08,
                FREE,
                clamp=False,
            ).schedule.reuse
        )
        for signal in ("e", "e0")
        for scale in (0.3, 1.0, 3.0)
    }
    assert any(5 < count < 45 for count in counts)


@pytest.mark.parametrize(
    ("threshold", "golden"),
    [
        # P = .02: .02 and .04 reuse, .06 >= .05 computes and clears the sum; steps 0 and 11 are forced.
        (0.05, (1, 2, 4, 5, 7, 8, 10)),
        # .02, .04, .06 reuse, .08 is not strictly below .08
        (0.08, (1, 2, 3, 5, 6, 7, 9, 10)),
        (0.02, ()),
    ],
)
def test_golden_lists_of_a_constant_change(threshold: float, golden: tuple[int, ...]) -> None:
    """Check 28: the accumulation by hand; a sum equal to the threshold computes."""
    # .02 * k in binary: .06 and .08 accumulate to .06 and .08 exactly as written (checked by the second row).
    assert teacache_schedule([0.1] * 11, [constant(0.02)], threshold, FREE).schedule.reuse == golden


def test_hits_keep_the_sum_and_forced_steps_clear_it() -> None:
    limits = SkipLimits(warmup_steps=3, cooldown_steps=1, max_consecutive=100, min_anchors=1)
    changes = [0.9, 0.9, 0.03, 0.01, 0.02, 0.04, 0.04, 0.1]  # warm-up's .9 must not count against step 3
    assert teacache_schedule(changes, [identity()], 0.05, limits).schedule.reuse == (3, 4, 6)


def test_negative_prediction_is_clamped() -> None:
    """Check 12: a negative P costs 0, and does not pay for later steps; unclamped it would."""
    changes = [0.0, 0.04, 0.04, 0.04, 0.0]
    rule = StageRule((0.0, 0.0, 0.0, 2.0, -0.04), None)  # P(0) = -.04, P(.04) = .04
    assert teacache_schedule(changes, [rule], 0.05, FREE).schedule.reuse == (1, 2, 4)
    assert teacache_schedule(changes, [rule], 0.05, FREE, clamp=False).schedule.reuse == (1, 2, 3)


def test_out_of_range_computes_and_is_counted() -> None:
    """Check 12: below or above the calibrated range; the ends themselves are inside; forced steps are not counted."""
    changes = [0.5, 0.01, 0.009, 0.02, 0.021, 0.015, 0.5]
    planned = teacache_schedule(changes, [identity((0.01, 0.02))], 1.0, LIMITS_2_1)
    assert planned.schedule.reuse == (2, 4, 6)
    assert planned.out_of_range == (3, 5)


LIMITS_2_1 = SkipLimits(warmup_steps=2, cooldown_steps=1, max_consecutive=100, min_anchors=1)


def test_every_stage_has_to_allow_a_hit() -> None:
    """One A a stage; a full step clears all of them."""
    slow, fast = constant(0.02), constant(0.03)  # alone: full every 3rd and every 2nd free step at .05
    both = teacache_schedule([0.1] * 9, [slow, fast], 0.05, FREE).schedule.reuse
    assert both == teacache_schedule([0.1] * 9, [fast], 0.05, FREE).schedule.reuse == (1, 3, 5, 7)
    # Alternating demands: stage 0 objects on odd totals, stage 1 never; clearing both keeps them in step.
    assert teacache_schedule([0.1] * 9, [fast, slow], 0.05, FREE).schedule.reuse == both


def test_any_stage_out_of_range_makes_the_step_full() -> None:
    planned = teacache_schedule([0.1, 0.2, 0.1], [identity((0, 1)), identity((0, 0.15))], 9.0, FREE)
    assert planned.schedule.reuse == (1,)  # step 3 is the last
    assert planned.out_of_range == (2,)


def test_threshold_zero_reuses_nothing() -> None:
    """Check 27: with the clamp, threshold 0 is native; without it a negative P would hit."""
    changes = [0.2] * 49
    rule = StageRule(PUBLISHED["t2v-1.3b", "e"], None)
    assert polynomial(rule.coefficients, 0.2) < 0
    assert teacache_schedule(changes, [rule], 0.0, FREE).schedule.reuse == ()
    assert teacache_schedule(changes, [rule], 0.0, FREE, clamp=False).schedule.reuse != ()


@given(
    changes=st.lists(st.floats(0, 0.5), min_size=20, max_size=60),
    threshold=st.floats(0, 1),
    limits=st.builds(
        SkipLimits,
        warmup_steps=st.integers(1, 8),
        cooldown_steps=st.integers(0, 8),
        max_consecutive=st.integers(1, 3),
        min_anchors=st.integers(1, 2),
    ),
)
def test_a_derived_schedule_obeys_its_limits(changes: list[float], threshold: float, limits: SkipLimits) -> None:
    """Check 13: warm-up, cool-down, hits in a row and anchors, for any signal; counted in steps, so branches and chains
    do not enter at all."""
    schedule = teacache_schedule(changes, [identity((0.0, 0.4))], threshold, limits).schedule
    steps = len(changes) + 1
    limits.check(schedule)  # and, spelled out:
    assert not any(
        schedule.reuses(i) for i in [*range(limits.warmup_steps), *range(steps - limits.cooldown_steps, steps)]
    )
    for hit in schedule.reuse:
        assert not all(schedule.reuses(hit - back) for back in range(limits.max_consecutive + 1))
        assert len(schedule.anchors(hit, limits.min_anchors)) == limits.min_anchors


@pytest.mark.parametrize(
    ("reuse", "words"),
    [((5, 12), "step 5 of 50"), ((12, 42), "step 42 of 50"), ((12, 13), "step 13 is hit number 2 in a row")],
)
def test_explicit_schedules_are_held_to_their_limits(reuse: tuple[int, ...], words: str) -> None:
    """Check 13: the default limits keep steps 0-5 and 42-49 full, and allow no two hits in a row."""
    with pytest.raises(ScheduleError, match=words):
        SkipLimits().check(Schedule(50, reuse))
    SkipLimits().check(Schedule(50, (6, 8, 41)))


def test_min_anchors_delays_the_first_hit() -> None:
    limits = SkipLimits(warmup_steps=1, cooldown_steps=0, max_consecutive=1, min_anchors=2)
    with pytest.raises(ScheduleError, match="step 1 of 9"):
        limits.check(Schedule(9, (1,)))
    limits.check(Schedule(9, (2, 4)))
    assert teacache_schedule([0.0] * 8, [identity()], 0.1, limits).schedule.reuse == (2, 4, 6, 8)


@pytest.mark.parametrize("reuse", [(0,), (3, 2), (3, 3), (50,)])
def test_malformed_schedules_are_refused(reuse: tuple[int, ...]) -> None:
    """Check 9: step 0 can never reuse."""
    with pytest.raises(ScheduleError):
        Schedule(50, reuse)


def test_anchors_are_the_last_full_steps() -> None:
    schedule = Schedule(20, (8, 10, 11, 15))
    assert schedule.anchors(8, 2) == (7, 6)
    assert schedule.anchors(10, 2) == (9, 7)  # 8 was a hit
    assert schedule.anchors(11, 2) == (9, 7)
    assert schedule.anchors(12, 2) == (9, 7)
    assert schedule.anchors(15, 2) == (14, 13)
    assert schedule.anchors(1, 2) == (0,)
    assert schedule.anchor_steps(2) == {6, 7, 9, 13, 14}


def test_a_veto_leaves_the_earlier_hits() -> None:
    assert Schedule(20, (8, 10, 15)).until(10) == Schedule(20, (8,))


def test_equal_schedules_have_equal_digests_only() -> None:
    digests = {Schedule(steps, reuse).digest for steps in (20, 21) for reuse in ((), (8,), (8, 10))}
    assert len(digests) == 6
    assert Schedule(20, (8, 10)).digest == Schedule(20, (8, 10)).digest


def test_non_finite_changes_are_refused() -> None:
    with pytest.raises(ScheduleError, match="finite"):
        teacache_schedule([0.1, float("nan")], [identity()], 0.1, FREE)


def test_magcache_by_hand() -> None:
    """R = .9, .81, .729: errors .1, .29 (K 3, threshold .3), .561 > .3 computes and clears."""
    limits = SkipLimits(warmup_steps=2, cooldown_steps=0, max_consecutive=3, min_anchors=1)
    assert magcache_schedule([[0.9] * 10], 0.3, limits).schedule.reuse == (2, 3, 5, 6, 8, 9)


class CountingBlock(torch.nn.Module):
    """Adds 1; counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, hidden_states: torch.Tensor, encoder_hidden_states: torch.Tensor | None = None) -> torch.Tensor:
        self.calls += 1
        return hidden_states + 1.0


def test_magcache_equals_diffusers() -> None:
    """Oracle: diffusers' own hooks on two counting blocks, 30 steps of one branch."""
    from diffusers.hooks._helpers import TransformerBlockMetadata, TransformerBlockRegistry
    from diffusers.hooks.mag_cache import MagCacheConfig, apply_mag_cache

    ratios = [1.0, *(1.0 - 0.002 * i for i in range(1, 30))]
    model = torch.nn.Module()
    model.transformer_blocks = torch.nn.ModuleList([CountingBlock(), CountingBlock()])
    metadata = TransformerBlockMetadata(return_hidden_states_index=0, return_encoder_hidden_states_index=None)
    TransformerBlockRegistry.register(CountingBlock, metadata)
    apply_mag_cache(
        model,
        MagCacheConfig(
            threshold=0.06, max_skip_steps=2, retention_ratio=0.2, num_inference_steps=30, mag_ratios=ratios
        ),
    )
    hits = []
    for step in range(30):
        before = model.transformer_blocks[0].calls
        hidden = torch.zeros(1, 2, 2)
        for block in model.transformer_blocks:
            hidden = block(hidden)
        if model.transformer_blocks[0].calls == before:
            hits.append(step)
    limits = SkipLimits(warmup_steps=6, cooldown_steps=0, max_consecutive=2, min_anchors=1)
    assert 3 < len(hits) < 24
    assert magcache_schedule([ratios, ratios], 0.06, limits).schedule.reuse == tuple(hits)


def test_magcache_wants_lists_of_one_length() -> None:
    with pytest.raises(ScheduleError, match=r"lengths \[3, 4\]"):
        magcache_schedule([[1.0] * 3, [1.0] * 4], 0.1, FREE)
