"""Noise is a pure function of (seed, chunk, draw)."""

from __future__ import annotations

import itertools

import pytest
import torch

from deployments.lingbot.noise import chunk_noise

SHAPE = (1, 16, 2, 8, 12)
FIRST = [-1.0952322483062744, -1.1595014333724976, -1.2282311916351318, -0.04983508959412575]


def test_the_same_name_gives_the_same_bits_and_the_first_numbers_are_known() -> None:
    noise = chunk_noise(7, 3, 2, SHAPE)
    assert noise.dtype == torch.float32
    assert noise.shape == SHAPE
    assert torch.equal(noise, chunk_noise(7, 3, 2, SHAPE))
    # Frozen: another numpy, key or draw order would turn every stored world into a wrong one.
    assert [float(x) for x in chunk_noise(0, 0, 0, (4,))] == FIRST


def test_seeds_chunks_and_draws_are_unrelated() -> None:
    draws = [chunk_noise(seed, chunk, draw, SHAPE) for seed, chunk, draw in itertools.product(range(3), repeat=3)]
    correlation = torch.corrcoef(torch.stack([x.flatten() for x in draws]))
    # 3072 independent numbers: all of 351 correlations are below 5 / sqrt(3072) = 0.09 in all but 1 of 5000 worlds.
    assert (correlation - torch.eye(len(draws))).abs().max() < 0.09


def test_it_is_standard_normal() -> None:
    noise = chunk_noise(1, 0, 0, (100_000,))
    # Three standard errors: 0.01 of the mean, 0.007 of the deviation.
    assert abs(noise.mean()) < 0.01
    assert abs(noise.std() - 1) < 0.007


@pytest.mark.parametrize("seed", [-1, 1 << 63])
def test_a_seed_out_of_range_is_refused(seed: int) -> None:
    with pytest.raises(ValueError, match=r"seed: got -?\d+, expected 0 to 9223372036854775807"):
        chunk_noise(seed, 0, 0, SHAPE)
