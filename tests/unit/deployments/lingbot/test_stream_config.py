"""Windows, frame counts and sizes, against the numbers of the releases and a list that is rolled by hand."""

from __future__ import annotations

import pytest

from deployments.lingbot.sampler_tables import V1_FAST
from deployments.lingbot.stream_config import (
    STREAMS,
    StreamConfig,
    fit_size,
    frame_tokens,
    pixel_frames,
    whole_chunks,
)


def stream(chunk: int, window: int, sink: int) -> StreamConfig:
    return StreamConfig(chunk, window, sink, V1_FAST)


@pytest.mark.parametrize(
    ("chunk", "window", "sink"), [(2, -1, 0), (2, 6, 2), (2, 5, 1), (2, 5, 2), (3, 7, 3), (4, 18, 6)]
)
def test_window_equals_a_rolled_list(chunk: int, window: int, sink: int) -> None:
    config, held = stream(chunk, window, sink), list[int]()
    for chunks in range(12):
        assert [config.frame_of_slot(chunks, slot) for slot in range(config.held_frames(chunks))] == held
        before = list(held)
        while window != -1 and len(held) + chunk > window:
            del held[sink]
        assert config.needed_frames(chunks) == tuple(held)
        assert set(config.needed_chunks(chunks)) == {frame // chunk for frame in held}
        assert set(held) <= set(before)
        held += range(chunks * chunk, (chunks + 1) * chunk)


def test_needed_frames_of_known_windows() -> None:
    assert len(stream(4, 18, 6).needed_frames(20)) == 14
    assert stream(3, 7, 3).needed_frames(4) == (0, 1, 2, 11)
    # The trie's oracle: a sink of one chunk and a window of three more.
    assert stream(1, 5, 1).needed_chunks(6) == (0, 3, 4, 5)


@pytest.mark.parametrize(
    ("chunk", "window", "sink", "message"),
    [
        (0, -1, 0, "chunk: got 0"),
        (3, -1, 1, "sink: got 1 with window -1"),
        (4, 9, 6, r"window: got 9 with sink 6 and chunk 4, expected -1 or at least sink \+ chunk = 10"),
        (4, 9, -1, "window: got 9 with sink -1"),
    ],
)
def test_windows_that_cannot_work_are_refused(chunk: int, window: int, sink: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        stream(chunk, window, sink)


def test_frames_of_chunks() -> None:
    assert [pixel_frames(i, 3) for i in range(3)] == [9, 12, 12]
    assert [pixel_frames(i, 4) for i in range(3)] == [13, 16, 16]
    assert (whole_chunks(81, 3), whole_chunks(13, 3), whole_chunks(37, 3)) == (7, 1, 3)


def test_sizes_of_the_releases() -> None:
    assert fit_size(480 * 832, 1080, 1920) == (464, 832)
    assert fit_size(480 * 832, 480, 832) == (480, 832)
    assert fit_size(720 * 1280, 720, 1280) == (720, 1280)
    assert (frame_tokens(464, 832), frame_tokens(480, 832), frame_tokens(720, 1280)) == (1508, 1560, 3600)
    with pytest.raises(ValueError, match="use a less extreme image"):
        fit_size(480 * 832, 1, 10_000)


def test_every_release_has_five_forwards() -> None:
    assert {config.forwards for config in STREAMS.values()} == {5}
