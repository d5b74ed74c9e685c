from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLWan
from diffusers.video_processor import VideoProcessor
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from deployments.wan.decoder import DecodingCancelled, VideoDecoder
from tests.checkpoints import write_wan_checkpoint

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("checkpoint")
    write_wan_checkpoint(out)
    return out


def latents() -> Tensor:
    return torch.randn(1, 16, 3, 6, 8, generator=torch.Generator().manual_seed(0))


def by_diffusers(folder: Path) -> np.ndarray:
    """As the end of `WanPipeline.__call__`: [9, 48, 64, 3] in [0, 1]."""
    vae = AutoencoderKLWan.from_pretrained(folder / "vae")
    shape = (1, vae.config.z_dim, 1, 1, 1)
    mean, std = (torch.tensor(getattr(vae.config, f"latents_{name}")).view(shape) for name in ("mean", "std"))
    with torch.inference_mode():
        video = vae.decode(latents() * std + mean, return_dict=False)[0]
    frames: np.ndarray = VideoProcessor(vae_scale_factor=8).postprocess_video(video, output_type="np")[0]
    return frames


def test_frames_are_those_of_diffusers(folder: Path):
    frames = VideoDecoder(folder, torch.float32, CPU).decode(latents(), threading.Event())
    assert frames.shape == (9, 48, 64, 3)
    assert frames.dtype == np.uint8
    # Another order of the same sums: what lies next to x.5 rounds to either level.
    assert np.abs(frames - by_diffusers(folder) * 255).max() <= 0.5 + 1e-2
    assert frames.std() > 1, "a constant video would agree with anything"


def test_no_convolution_takes_the_slow_path_on_a_cpu(folder: Path):
    decoder = VideoDecoder(folder, torch.float32, CPU)
    with profile(activities=[ProfilerActivity.CPU]) as run:
        decoder.decode(latents(), threading.Event())
    names = {event.key for event in run.key_averages()}
    assert "aten::mkldnn_convolution" in names
    assert not {name for name in names if "slow_conv3d" in name}


def test_a_cancelled_decoding_stops_at_the_next_latent_frame(folder: Path):
    cancelled = threading.Event()
    cancelled.set()
    with pytest.raises(DecodingCancelled):
        VideoDecoder(folder, torch.float32, CPU).decode(latents(), cancelled)
