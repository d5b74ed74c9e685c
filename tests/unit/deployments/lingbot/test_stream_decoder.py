"""Streaming decode against diffusers' whole decode, on frames of 16x16 pixels: time is what matters here."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLWan
from torch import Tensor

from deployments.lingbot.checkpoint import VAE_FILE
from deployments.lingbot.condition import condition_slice, encode_condition
from deployments.lingbot.stream_config import WARM_LATENTS
from deployments.lingbot.stream_decoder import StreamDecoder
from deployments.lingbot.vae import latent_statistics, load_vae
from deployments.wan.checkpoint_files import CheckpointError

CHUNK, CHUNKS = 3, 15


@pytest.fixture(scope="module")
def vae(world_folder: Path) -> AutoencoderKLWan:
    return load_vae(world_folder / VAE_FILE, torch.float32, torch.device("cpu"))


@pytest.fixture(scope="module")
def latents() -> Tensor:
    return torch.randn(1, 16, CHUNK * CHUNKS, 2, 2, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def whole(vae: AutoencoderKLWan, latents: Tensor) -> np.ndarray:
    """diffusers' decode of all latents at once."""
    mean, std = latent_statistics(vae)
    with torch.inference_mode():
        video = vae.decode(latents * std + mean).sample[0]
    return (video * 0.5 + 0.5).mul(255).round().to(torch.uint8).permute(1, 2, 3, 0).numpy()


@pytest.fixture(scope="module")
def streamed(vae: AutoencoderKLWan, latents: Tensor) -> list[np.ndarray]:
    decoder = StreamDecoder(vae)
    state = decoder.start()
    return [decoder.decode(part, state) for part in latents.split(CHUNK, dim=2)]


def test_streamed_chunks_equal_the_whole(streamed: list[np.ndarray], whole: np.ndarray) -> None:
    assert [len(frames) for frames in streamed[:3]] == [9, 12, 12]
    assert whole.std() > 10  # not a constant picture
    assert np.array_equal(np.concatenate(streamed), whole)


def test_forty_latents_rebuild_the_state(vae: AutoencoderKLWan, latents: Tensor, streamed: list[np.ndarray]) -> None:
    decoder, position = StreamDecoder(vae), CHUNK * (CHUNKS - 1)
    state = decoder.warm(latents[:, :, position - WARM_LATENTS : position], position)
    assert np.array_equal(decoder.decode(latents[:, :, position:], state), streamed[-1])
    with pytest.raises(ValueError, match="latents: got 3 before latent 42, expected 40"):
        decoder.warm(latents[:, :, :3], position)


def test_state_forks_and_survives_bytes(vae: AutoencoderKLWan, latents: Tensor, streamed: list[np.ndarray]) -> None:
    decoder = StreamDecoder(vae)
    state = decoder.start()
    decoder.decode(latents[:, :, :CHUNK], state)
    twin, saved = state.fork(), state.to_bytes()
    decoder.decode(torch.zeros(1, 16, CHUNK, 2, 2), state)
    second = latents[:, :, CHUNK : 2 * CHUNK]
    assert np.array_equal(decoder.decode(second, twin), streamed[1])
    assert np.array_equal(decoder.decode(second, decoder.load(saved)), streamed[1])
    assert state.nbytes == twin.nbytes > 0


def test_state_after_one_latent_survives_bytes(vae: AutoencoderKLWan, latents: Tensor, whole: np.ndarray) -> None:
    """Two slots then hold a mark instead of a tensor."""
    decoder = StreamDecoder(vae)
    state = decoder.start()
    decoder.decode(latents[:, :, :1], state)
    again = decoder.load(state.to_bytes())
    assert again.latents == 1
    assert np.array_equal(decoder.decode(latents[:, :, 1:3], again), whole[1:9])


def test_a_call_that_fails_leaves_the_state(vae: AutoencoderKLWan, latents: Tensor, streamed: list[np.ndarray]) -> None:
    decoder = StreamDecoder(vae)
    state, calls = decoder.start(), 0

    def fail(*_: object) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise RuntimeError("out of memory")

    hook = vae.decoder.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        decoder.decode(latents[:, :, :CHUNK], state)
    hook.remove()
    assert np.array_equal(decoder.decode(latents[:, :, :CHUNK], state), streamed[0])


def test_condition_is_constant_from_latent_30_on(vae: AutoencoderKLWan) -> None:
    """So that 31 latents stand for a world of any length; the oracle encodes 35."""
    image = torch.randint(0, 256, (20, 24, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    condition = encode_condition(vae, image, 16, 16)
    assert condition.shape == (20, 31, 2, 2)
    assert condition[:4, 0].min() == 1
    assert condition[:4, 1:].abs().max() == 0
    pixels = torch.nn.functional.interpolate(image.permute(2, 0, 1)[None] / 127.5 - 1, (16, 16), mode="bicubic")
    video = torch.cat([pixels.clamp(-1, 1)[:, :, None], torch.zeros(1, 3, 4 * 34, 16, 16)], 2)
    mean, std = latent_statistics(vae)
    with torch.inference_mode():
        longer = ((vae.encode(video).latent_dist.mode() - mean) / std)[0]
    assert torch.equal(condition_slice(condition, 0, 35)[0, 4:], longer)
    assert torch.equal(condition_slice(condition, 29, 3)[0, 4:], longer[:, 29:32])
    assert not torch.equal(longer[:, 0], longer[:, 30])


def test_what_is_no_image_is_refused(vae: AutoencoderKLWan) -> None:
    with pytest.raises(ValueError, match=r"image: got \[3, 8, 8\] torch.uint8, expected \[height, width, 3\] uint8"):
        encode_condition(vae, torch.zeros(3, 8, 8, dtype=torch.uint8), 16, 16)


def test_what_is_no_vae_is_refused(tmp_path: Path) -> None:
    torch.save({"weight": torch.ones(2)}, tmp_path / VAE_FILE)
    with pytest.raises(CheckpointError, match=r"Wan2.1_VAE.pth: lacks 'encoder.conv_in.weight'"):
        load_vae(tmp_path / VAE_FILE, torch.float32, torch.device("cpu"))
    (tmp_path / VAE_FILE).write_bytes(b"no tensors")
    with pytest.raises(CheckpointError, match=r"Wan2.1_VAE.pth: cannot be read"):
        load_vae(tmp_path / VAE_FILE, torch.float32, torch.device("cpu"))
