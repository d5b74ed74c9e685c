from __future__ import annotations

import pytest
import torch
from diffusers import AutoencoderKLWan

from app.jobs.train_shapes.whole_clip import WholeClip, to_channels_last

TOLERANCE = 1e-5  # fp32, the same sums in another order; outputs are of size 1


@pytest.fixture(scope="module")
def vae() -> AutoencoderKLWan:
    torch.manual_seed(0)
    return AutoencoderKLWan(base_dim=8, dim_mult=[1, 2, 2, 2], num_res_blocks=1).eval().requires_grad_(False)


@pytest.mark.parametrize("frames", [1, 5, 9, 17])
def test_one_pass_equals_the_chunk_loop(vae: AutoencoderKLWan, frames: int):
    clip = torch.rand(2, 3, frames, 32, 32, generator=torch.Generator().manual_seed(frames)) * 2 - 1
    latents = torch.randn(2, 16, (frames + 3) // 4, 4, 4, generator=torch.Generator().manual_seed(frames))
    whole = WholeClip(vae)
    mean, log_variance = whole.encode(clip)
    expected = vae.encode(clip).latent_dist
    torch.testing.assert_close(mean, expected.mean, atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(log_variance, expected.logvar, atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(whole.decode(latents).clamp(-1, 1), vae.decode(latents).sample, atol=TOLERANCE, rtol=0)


def test_the_layout_of_weights_changes_no_value(vae: AutoencoderKLWan):
    before = {name: value.clone() for name, value in vae.state_dict().items()}
    to_channels_last(vae)
    assert all(torch.equal(before[name], value) for name, value in vae.state_dict().items())
