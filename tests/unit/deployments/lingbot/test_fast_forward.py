"""The cheapest way: hand-made costs, and every way tried by force."""

from __future__ import annotations

import itertools

import pytest

from deployments.lingbot.fast_forward import CatchUp, ChunkCosts, FrameOp, cheapest_catch_up, cheapest_frames
from deployments.lingbot.sampler_tables import V1_FAST
from deployments.lingbot.stream_config import StreamConfig

ROLLING = StreamConfig(1, 5, 1, V1_FAST)
"""A sink of one chunk and the last three: the window after six chunks needs 0, 3, 4 and 5."""
CHEAP_COPY = ChunkCosts(generate=50, clean=10, restore=1, decode=6, frames=1)
DEAR_COPY = ChunkCosts(generate=50, clean=10, restore=100, decode=6, frames=1)


def test_nothing_to_do() -> None:
    assert cheapest_catch_up(0, 0, [], ROLLING, CHEAP_COPY) == CatchUp(None, 0, 0, 0)
    assert cheapest_catch_up(4, 4, [True] * 4, ROLLING, CHEAP_COPY) == CatchUp(None, 4, 4, 0)


def test_a_window_is_restored_where_copying_is_cheap_and_replayed_where_it_is_not() -> None:
    kept = [True] * 6
    assert cheapest_catch_up(0, 6, kept, ROLLING, CHEAP_COPY) == CatchUp(6, 6, 6, 4)
    assert cheapest_catch_up(0, 6, kept, ROLLING, DEAR_COPY) == CatchUp(None, 0, 6, 60)


def test_only_the_chunks_that_are_seen_later_have_to_be_kept() -> None:
    kept = [True, False, False, True, True, True]
    assert cheapest_catch_up(0, 6, kept, ROLLING, CHEAP_COPY).restore == 6
    # Without 5 the nearest whole window is that after chunk 0: the ones after 4 and 5 chunks need 1 or 2.
    assert cheapest_catch_up(0, 6, [*kept[:5], False], ROLLING, CHEAP_COPY) == CatchUp(1, 1, 6, 51)


def test_without_the_sink_everything_is_replayed() -> None:
    assert cheapest_catch_up(0, 6, [False] + [True] * 5, ROLLING, CHEAP_COPY) == CatchUp(None, 0, 6, 60)


def test_a_live_window_goes_on() -> None:
    # One clean pass (10) against four copies (4): copying wins; against 40 it does not.
    costs = ChunkCosts(generate=50, clean=10, restore=10, decode=6, frames=1)
    assert cheapest_catch_up(5, 6, [True] * 6, ROLLING, CHEAP_COPY).restore == 6
    assert cheapest_catch_up(5, 6, [True] * 6, ROLLING, costs) == CatchUp(None, 5, 6, 10)
    with pytest.raises(ValueError, match=r"target: got 7, expected 5 \(live\) to 6"):
        cheapest_catch_up(5, 7, [True] * 6, ROLLING, costs)


def test_frames_are_fetched_until_the_decoder_has_to_be_there() -> None:
    every = [True] * 4
    assert cheapest_frames(0, every, 0, 3, CHEAP_COPY, goes_on=False).ops == ("fetch",) * 4
    # Going on: warming at chunk 4 costs 4 chunks (12 latents), as decoding all of them; fetching is then in vain.
    plan = cheapest_frames(0, every, 0, 3, CHEAP_COPY, goes_on=True)
    assert (plan.ops, plan.warm_after, plan.seconds) == (("decode",) * 4, False, 24)
    # Far from the start 40 latents are 13.3 chunks, 80 s, less than 30 chunks.
    plan = cheapest_frames(0, [True] * 30, 0, 3, CHEAP_COPY, goes_on=True)
    assert (set(plan.ops), plan.warm_after, plan.seconds) == ({"fetch"}, True, 30 + 80)


def test_a_chunk_without_frames_is_decoded() -> None:
    plan = cheapest_frames(20, [True, False, True], None, 4, CHEAP_COPY, goes_on=False)
    assert plan.ops == ("fetch", "warm+decode", "fetch")
    assert plan.seconds == 1 + 60 + 6 + 1  # ten chunks of 4 latents warm it


@pytest.mark.parametrize("goes_on", [False, True])
@pytest.mark.parametrize("decoder_at", [None, 2, 3])
def test_frame_plans_are_optimal(goes_on: bool, decoder_at: int | None) -> None:
    """Against all ways for every pattern of five chunks."""
    costs, chunk, start = ChunkCosts(50, 10, 1, decode=6, frames=4), 10, 3

    def price(ways: tuple[bool, ...], stored: tuple[bool, ...]) -> float | None:
        ready, seconds = decoder_at == start, 0.0
        for position, (fetch, is_stored) in enumerate(zip(ways, stored, strict=True), start=start):
            if fetch and not is_stored:
                return None
            warm = 0.0 if ready or fetch else 6 * min(10 * position, 40) / 10
            seconds += 4 if fetch else 6 + warm
            ready = not fetch
        end = start + len(stored)
        return seconds + (6 * min(10 * end, 40) / 10 if goes_on and not ready else 0)

    for stored in itertools.product([False, True], repeat=5):
        prices = [price(ways, stored) for ways in itertools.product([False, True], repeat=5)]
        plan = cheapest_frames(start, stored, decoder_at, chunk, costs, goes_on=goes_on)
        assert plan.seconds == min(p for p in prices if p is not None)
        ops: tuple[FrameOp, ...] = plan.ops
        assert price(tuple(op == "fetch" for op in ops), stored) == plan.seconds
