"""The host's signal against diffusers' embedder and hand-made changes."""

from __future__ import annotations

import pytest
import torch
from diffusers.models.transformers.transformer_wan import WanTimeTextImageEmbedding

from deployments.stage_cache.timestep_signal import TimeEmbedder, relative_changes, sinusoid, timesteps_sha256


def weights() -> tuple[WanTimeTextImageEmbedding, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    module = WanTimeTextImageEmbedding(dim=48, time_freq_dim=32, time_proj_dim=6 * 48, text_embed_dim=16)
    return module, {f"condition_embedder.{name}": x for name, x in module.state_dict().items()}


def test_both_signals_equal_diffusers_in_fp32() -> None:
    """Check 28: e before the cast to the model dtype, e0 its projection."""
    module, state = weights()
    steps = [999.0, 731.0, 250.0, 3.0]
    with torch.no_grad():
        e, e0, _, _ = module(torch.tensor(steps), torch.zeros(1, 4, 16))
        embedder = TimeEmbedder.from_weights(state)
        # 1e-4: diffusers takes the phase t * f in fp32, which near t = 999 is off by up to 999 * 2^-24 = 6e-5 rad
        torch.testing.assert_close(embedder.signal("e", steps), e, atol=1e-4, rtol=0)
        torch.testing.assert_close(embedder.signal("e0", steps), e0, atol=1e-4, rtol=0)


def test_bf16_weights_give_an_fp32_signal() -> None:
    """A signal in bf16 moves in steps of 2^-8, as large as d itself."""
    _, state = weights()
    embedder = TimeEmbedder.from_weights({name: x.bfloat16() for name, x in state.items()})
    assert embedder.signal("e", [999.0, 998.0]).dtype == torch.float32
    (change,) = relative_changes(embedder.signal("e", [999.0, 998.0]))
    assert 0 < change < 1


def test_missing_weights_are_named() -> None:
    _, state = weights()
    del state["condition_embedder.time_proj.bias"]
    with pytest.raises(KeyError, match=r"time_proj\.bias"):
        TimeEmbedder.from_weights(state)


def test_sinusoid_is_cosines_then_sines() -> None:
    table = sinusoid([0.0, 1.0], 4)
    assert table[0].tolist() == [1.0, 1.0, 0.0, 0.0]
    # rates 1 and 10000^(-1/2) = .01; 1e-7: rounding to fp32
    expected = torch.tensor([0.5403023, 0.9999500, 0.8414710, 0.0099998])
    torch.testing.assert_close(table[1], expected, atol=1e-7, rtol=0)


def test_relative_changes_by_hand() -> None:
    signal = torch.tensor([[1.0, -1.0], [2.0, -1.0], [2.0, -1.0]])
    assert relative_changes(signal) == (0.5, 0.0)  # mean|(1, 0)| / mean|(1, 1)|
    assert relative_changes(signal[:1]) == ()


def test_timesteps_digest_sees_values_and_order_only() -> None:
    assert timesteps_sha256([999, 500]) == timesteps_sha256([999.0, 500.0])
    assert len({timesteps_sha256(t) for t in ([999, 500], [500, 999], [999, 501], [999])}) == 4
