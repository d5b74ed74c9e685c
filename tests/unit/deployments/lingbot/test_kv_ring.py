"""The ring against a list of frames that is rolled in the plainest way, over 20 chunks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from deployments.lingbot.kv_ring import KVRing, KVShape
from deployments.lingbot.sampler_tables import V1_FAST
from deployments.lingbot.stream_config import StreamConfig

TOKENS, LAYERS = 3, 2
SHAPE = KVShape(LAYERS, TOKENS, 2, 4, torch.float32, torch.device("cpu"))
WINDOWS = [(2, -1, 0), (2, 6, 2), (2, 5, 1), (2, 5, 2), (3, 7, 3)]


def stream(chunk: int, window: int, sink: int) -> StreamConfig:
    return StreamConfig(chunk, window, sink, V1_FAST)


class NaiveWindow:
    """One layer's frames as a list of (key, value) [TOKENS, 2, 4]."""

    def __init__(self, config: StreamConfig) -> None:
        self.config = config
        self.frames: list[tuple[Tensor, Tensor]] = []

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        for k, v in zip(key[0].split(TOKENS), value[0].split(TOKENS), strict=True):
            self.frames.append((k, v))
        while self.config.window != -1 and len(self.frames) > self.config.window:
            del self.frames[self.config.sink]
        return torch.cat([k for k, _ in self.frames])[None], torch.cat([v for _, v in self.frames])[None]


def drawn(config: StreamConfig, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    shape = (1, config.chunk * TOKENS, 2, 4)
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


def assert_equal(a: KVRing, b: KVRing) -> None:
    assert (a.frames, a.held) == (b.frames, b.held)
    for layer in range(LAYERS):
        for x, y in zip(a.window(layer), b.window(layer), strict=True):
            assert torch.equal(x, y)


@pytest.mark.parametrize(("chunk", "window", "sink"), WINDOWS)
def test_ring_equals_the_oracle_for_20_chunks(chunk: int, window: int, sink: int) -> None:
    config, generator = stream(chunk, window, sink), torch.Generator().manual_seed(0)
    ring, oracles = KVRing(SHAPE, config), [NaiveWindow(config) for _ in range(LAYERS)]
    for number in range(20):
        final = [drawn(config, generator) for _ in range(LAYERS)]
        for attempt in range(5):
            ring.begin(number)  # every pass may say so
            for layer, oracle in enumerate(oracles):
                key, value = final[layer] if attempt == 4 else drawn(config, generator)
                got = ring.write(layer, key, value)
                if attempt == 4:
                    for x, y in zip(got, oracle.append(key, value), strict=True):
                        assert torch.equal(x, y)
        assert ring.frames == (number + 1) * chunk
        assert ring.held == len(oracles[0].frames)


@pytest.mark.parametrize(("window", "sink", "held"), [(-1, 0, 288), (6, 2, 144), (5, 1, 120)])
def test_known_lengths_after_six_chunks_of_two(window: int, sink: int, held: int) -> None:
    config, shape = stream(2, window, sink), KVShape(1, 24, 1, 2, torch.float32, torch.device("cpu"))
    ring = KVRing(shape, config)
    for number in range(6):
        ring.begin(number)
    assert ring.frames * 24 == 288
    assert ring.held * 24 == held


@pytest.mark.parametrize(("chunk", "window", "sink"), WINDOWS)
def test_a_restored_ring_is_as_good_from_the_next_chunk_on(chunk: int, window: int, sink: int) -> None:
    config, generator = stream(chunk, window, sink), torch.Generator().manual_seed(1)
    ring, blobs, restored = KVRing(SHAPE, config), {}, list[KVRing]()
    for number in range(10):
        contents = [drawn(config, generator) for _ in range(LAYERS)]
        for one in (ring, *restored):
            one.begin(number)
            for layer, content in enumerate(contents):
                one.write(layer, *content)
        for one in restored:
            assert_equal(one, ring)
        blobs[number] = torch.empty(ring.blob_shape())
        ring.export_chunk(blobs[number])
        needed = {i: blobs[i] for i in config.needed_chunks(number + 1)}
        restored.append(KVRing.restored(SHAPE, config, number + 1, needed))


def test_restoring_refuses_missing_and_misshapen_blobs() -> None:
    config = stream(2, 6, 2)
    ring = KVRing(SHAPE, config)
    blob = torch.zeros(ring.blob_shape())
    with pytest.raises(KeyError):
        KVRing.restored(SHAPE, config, 2, {0: blob})
    with pytest.raises(ValueError, match=r"keys and values of chunk 1: got \[1, 2, 6, 2, 4\]"):
        KVRing.restored(SHAPE, config, 2, {0: blob, 1: blob[:1]})
    with pytest.raises(ValueError, match=r"torch.float16, expected \[2, 2, 6, 2, 4\] torch.float32"):
        KVRing.restored(SHAPE, config, 2, {0: blob, 1: blob.half()})


def test_truncating_works_until_something_was_dropped() -> None:
    config, generator = stream(2, 6, 2), torch.Generator().manual_seed(2)
    ring, snapshots = KVRing(SHAPE, config), []
    for number in range(4):
        snapshots.append(ring.clone())
        ring.begin(number)
        for layer in range(LAYERS):
            ring.write(layer, *drawn(config, generator))
    at_three = snapshots[3].clone()
    assert not ring.truncate(3)
    assert ring.frames == 8
    assert at_three.truncate(1)
    assert_equal(at_three, snapshots[1])
    assert not at_three.truncate(2)  # never forward
    assert_equal(at_three, snapshots[1])


def test_a_clone_is_independent() -> None:
    config = stream(2, -1, 0)
    ring = KVRing(SHAPE, config)
    ring.begin(0)
    twin = ring.clone()
    ring.write(0, torch.ones(1, 6, 2, 4), torch.ones(1, 6, 2, 4))
    assert twin.window(0)[0].abs().max() == 0


def test_chunks_come_in_order() -> None:
    ring = KVRing(SHAPE, stream(2, 6, 2))
    with pytest.raises(ValueError, match="chunk: got 1 after 0 frames, expected 0"):
        ring.begin(1)


def test_bytes() -> None:
    # 2 (k, v) x 2 layers x 3 tokens x 2 heads x 4 channels x 4 bytes.
    assert SHAPE.frame_bytes() == 384
    assert KVRing(SHAPE, stream(2, 6, 2)).nbytes == 6 * 384
