"""The causal stage: against diffusers' Wan blocks, against a plain re-computation with a mask, and cut in every way."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
from diffusers import WanTransformer3DModel
from torch import Tensor
from torch.nn import functional as F

from deployments.lingbot.checkpoint import WorldCheckpoint, load_stage
from deployments.lingbot.kv_ring import KVRing, KVShape
from deployments.lingbot.random_checkpoint import SMALL
from deployments.lingbot.rope import rotary_table
from deployments.lingbot.sampler_tables import V1_FAST
from deployments.lingbot.stage import WorldStage
from deployments.lingbot.stream_config import StreamConfig

CPU = torch.device("cpu")
GRID = (2, 4, 6)
"""Two latent frames of 8x12 latents: 24 tokens each."""


def load(checkpoint: WorldCheckpoint, blocks: range, dtype: torch.dtype = torch.float32) -> WorldStage:
    return load_stage(checkpoint, blocks, dtype=dtype, device=CPU)


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def ring_of(stage: WorldStage, stream: StreamConfig) -> KVRing:
    shape = KVShape(len(stage.blocks), GRID[1] * GRID[2], SMALL.num_heads, SMALL.head_dim, stage.dtype, CPU)
    return KVRing(shape, stream)


def run_chunks(
    stages: Sequence[WorldStage], stream: StreamConfig, chunks: int, *, clean_only: bool = False
) -> list[Tensor]:
    """Flows of each chunk at t = 947, each followed by a clean pass on the same latents; all rings at the end."""
    text = draw(7, SMALL.text_dim, seed=1)
    kv = [stage.text_kv(text) for stage in stages]
    rings = [ring_of(stage, stream) for stage in stages]
    out = []
    for chunk in range(chunks):
        latents, condition = draw(1, 16, 2, 8, 12, seed=10 + chunk), draw(1, 20, 2, 8, 12, seed=30 + chunk)
        control = draw(1, 384, 2, 8, 12, seed=50 + chunk)
        table = rotary_table(2 * chunk, GRID, SMALL.head_dim)
        inputs = [stage.chunk_inputs(control, table) for stage in stages]
        for ring in rings:
            ring.begin(chunk)
        for timestep in (0,) if clean_only else (947, 0):
            hidden: Tensor | None = stages[0].embed(latents, condition)
            for stage, i, t, ring in zip(stages, inputs, kv, rings, strict=True):
                assert hidden is not None
                time = stage.time(timestep)
                hidden = stage(hidden, time, i, t, ring) if timestep else stage.write_kv(hidden, time, i, t, ring)
            if timestep:
                assert hidden is not None
                out.append(hidden)
            else:
                assert hidden is None
    return out + [x for ring in rings for layer in range(ring._shape.layers) for x in ring.window(layer)]


GLOBAL = StreamConfig(2, -1, 0, V1_FAST)
ROLLING = StreamConfig(2, 5, 1, V1_FAST)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cut", [(2,), (1, 3), (1, 2, 3)])
@torch.inference_mode()
def test_any_cut_equals_the_whole(checkpoint: WorldCheckpoint, cut: tuple[int, ...], dtype: torch.dtype) -> None:
    edges = [0, *cut, 4]
    parts = [load(checkpoint, range(a, b), dtype) for a, b in itertools.pairwise(edges)]
    whole, cut_up = (run_chunks(s, ROLLING, 4) for s in ([load(checkpoint, range(4), dtype)], parts))
    assert len(whole) == len(cut_up) == 4 + 8
    assert all(torch.equal(a, b) for a, b in zip(whole, cut_up, strict=True))


@torch.inference_mode()
def test_clean_passes_alone_rebuild_the_same_window(checkpoint: WorldCheckpoint) -> None:
    stages = [load(checkpoint, range(4))]
    for stream in (GLOBAL, ROLLING, StreamConfig(2, 6, 2, V1_FAST)):
        live, replayed = run_chunks(stages, stream, 6)[6:], run_chunks(stages, stream, 6, clean_only=True)
        assert all(torch.equal(a, b) for a, b in zip(live, replayed, strict=True))


def diffusers_twin(checkpoint: WorldCheckpoint) -> WanTransformer3DModel:
    """The same weights, less the camera path, as diffusers' Wan transformer."""
    model = WanTransformer3DModel(
        num_attention_heads=4,
        attention_head_dim=16,
        in_channels=36,
        out_channels=16,
        text_dim=48,
        freq_dim=32,
        ffn_dim=160,
        num_layers=4,
    )
    names = {
        "patch_embedding": "patch_embedding",
        "time_embedding.0": "condition_embedder.time_embedder.linear_1",
        "time_embedding.2": "condition_embedder.time_embedder.linear_2",
        "time_projection.1": "condition_embedder.time_proj",
        "text_embedding.0": "condition_embedder.text_embedder.linear_1",
        "text_embedding.2": "condition_embedder.text_embedder.linear_2",
        "head.head": "proj_out",
    }
    inner = {
        "self_attn": "attn1",
        "cross_attn": "attn2",
        "norm3": "norm2",
        "ffn.0": "ffn.net.0.proj",
        "ffn.2": "ffn.net.2",
    }
    parts = {".q.": ".to_q.", ".k.": ".to_k.", ".v.": ".to_v.", ".o.": ".to_out.0."}
    state = {}
    for name, tensor in load(checkpoint, range(4)).state_dict().items():
        if "cam_" in name or "wancamctrl" in name or name.startswith("c2ws"):
            continue
        new = name.replace("head.modulation", "scale_shift_table")
        for a, b in (inner | parts if name.startswith("blocks.") else names).items():
            new = new.replace(a, b)
        state[new.replace(".modulation", ".scale_shift_table")] = tensor
    model.load_state_dict(state)
    return model.eval()


def without_camera(stage: WorldStage) -> WorldStage:
    """The camera path at zero: scale 1, shift 0."""
    for block in stage.blocks:
        for layer in (block.cam_scale_layer, block.cam_shift_layer):
            layer.weight.zero_()
            layer.bias.zero_()
    return stage


# diffusers computes the time signal's angles in fp32: at t = 825 they are off by up to 825 * 2**-24 = 5e-5, at 0 exact.
@pytest.mark.parametrize(("timestep", "tolerance"), [(0, 3e-6), (825, 5e-5)])
@torch.inference_mode()
def test_with_the_camera_at_zero_it_is_diffusers_wan(
    checkpoint: WorldCheckpoint, timestep: int, tolerance: float
) -> None:
    stage = without_camera(load(checkpoint, range(4)))
    latents, condition, text = draw(1, 16, 2, 8, 12, seed=3), draw(1, 20, 2, 8, 12, seed=4), draw(9, 48, seed=5)
    ring = ring_of(stage, GLOBAL)
    ring.begin(0)
    inputs = stage.chunk_inputs(draw(1, 384, 2, 8, 12, seed=6), rotary_table(0, GRID, 16))
    flow = stage(stage.embed(latents, condition), stage.time(timestep), inputs, stage.text_kv(text), ring)
    padded = torch.cat([text, text.new_zeros(16 - 9, 48)])[None]
    wan = diffusers_twin(checkpoint)
    expected = wan(torch.cat([latents, condition], 1), torch.tensor([timestep]), padded, return_dict=False)[0]
    assert expected.abs().max() > 0.5
    # Beside that, fp32 sums in another order and fp64 rotation against fp32: units in the last place of values near 2.
    assert (flow - expected).abs().max() < tolerance


def plain_block(w: dict[str, Tensor], x: Tensor, e0: Tensor, p: Tensor, text: Tensor, table: Tensor) -> Tensor:
    """One block of one chunk, formula by formula: x, p [L, D]; e0 [6, D]; text [n, D] embedded; table [L, 1, E / 2]."""

    def linear(name: str, a: Tensor) -> Tensor:
        return a @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    def normed(a: Tensor) -> Tensor:
        centred = a - a.mean(-1, keepdim=True)
        return centred / (centred.square().mean(-1, keepdim=True) + 1e-6).sqrt()

    def heads(part: str, which: str, a: Tensor) -> Tensor:
        a = linear(f"{part}.{which}", a)
        if which != "v":
            a = a / (a.square().mean(-1, keepdim=True) + 1e-6).sqrt() * w[f"{part}.norm_{which}.weight"]
        return a.unflatten(-1, (4, 16))

    def turned(a: Tensor) -> Tensor:
        pairs = torch.complex(a[..., 0::2].double(), a[..., 1::2].double()) * table
        return torch.stack([pairs.real, pairs.imag], -1).flatten(-2).float()

    def attention(part: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = (torch.einsum("ihe,jhe->hij", q, k) / 4).softmax(-1)
        return linear(f"{part}.o", torch.einsum("hij,jhe->ihe", weights, v).flatten(1))

    sh1, sc1, g1, sh2, sc2, g2 = w["modulation"][0] + e0
    h = normed(x) * (1 + sc1) + sh1
    q, k = turned(heads("self_attn", "q", h)), turned(heads("self_attn", "k", h))
    x = x + g1 * attention("self_attn", q, k, heads("self_attn", "v", h))
    seen = linear("cam_injector_layer2", F.silu(linear("cam_injector_layer1", p))) + p
    x = (1 + linear("cam_scale_layer", seen)) * x + linear("cam_shift_layer", seen)
    h = normed(x) * w["norm3.weight"] + w["norm3.bias"]
    x = x + attention("cross_attn", *(heads("cross_attn", n, a) for n, a in (("q", h), ("k", text), ("v", text))))
    h = normed(x) * (1 + sc2) + sh2
    return x + g2 * linear("ffn.2", F.gelu(linear("ffn.0", h), approximate="tanh"))


@torch.inference_mode()
def test_a_block_is_its_formulas_camera_included(checkpoint: WorldCheckpoint) -> None:
    stage = load(checkpoint, range(1))
    weights = {name.removeprefix("blocks.0."): x for name, x in stage.state_dict().items()}
    table, text, control = rotary_table(4, GRID, 16), draw(16, 48, seed=1), draw(1, 384, 2, 8, 12, seed=2)
    hidden, time, ring = draw(1, 48, 64, seed=3), stage.time(947), ring_of(stage, GLOBAL)
    ring.begin(0)
    got = stage(hidden, time, stage.chunk_inputs(control, table), stage.text_kv(text), ring)
    # '1 c (f 1) (h 2) (w 2) -> (f h w) (c 1 2 2)', then the embedding and its residual.
    tokens = control[0].view(384, 2, 4, 2, 6, 2).permute(1, 2, 4, 0, 3, 5).reshape(48, 1536)
    p = stage.patch_embedding_wancamctrl(tokens)
    p = p + stage.c2ws_hidden_states_layer2(F.silu(stage.c2ws_hidden_states_layer1(p)))
    expected = plain_block(weights, hidden[0], time.modulation[0, 0], p, stage.text_embedding(text), table)
    # fp32 sums in another order, values up to about 10.
    assert (got[0] - expected).abs().max() < 2e-5


@torch.inference_mode()
def test_the_cache_is_attention_over_all_frames_so_far(checkpoint: WorldCheckpoint) -> None:
    """Chunk by chunk with clean passes equals one pass over all chunks at t = 0 with a block-causal mask."""
    stage, chunks = load(checkpoint, range(4)), 3
    keys_and_values = run_chunks([stage], GLOBAL, chunks, clean_only=True)
    hidden = stage.embed(
        torch.cat([draw(1, 16, 2, 8, 12, seed=10 + i) for i in range(chunks)], 2),
        torch.cat([draw(1, 20, 2, 8, 12, seed=30 + i) for i in range(chunks)], 2),
    )
    control = torch.cat([draw(1, 384, 2, 8, 12, seed=50 + i) for i in range(chunks)], 2)
    inputs = stage.chunk_inputs(control, rotary_table(0, (6, 4, 6), 16))
    of_chunk = torch.arange(6 * 24) // 48
    mask = of_chunk[:, None] >= of_chunk[None, :]
    whole = StreamConfig(6, -1, 0, V1_FAST)
    ring = ring_of(stage, whole)
    ring.begin(0)
    attend = F.scaled_dot_product_attention

    def masked(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        same = query.shape[2] == key.shape[2]
        return attend(query, key, value, attn_mask=mask if same else None)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "scaled_dot_product_attention", masked)
        stage(hidden, stage.time(0), inputs, stage.text_kv(draw(7, 48, seed=1)), ring)
    expected = [x for layer in range(4) for x in ring.window(layer)]
    for got, want in zip(keys_and_values, expected, strict=True):
        # The same sums, split differently by the attention kernel.
        assert (got - want).abs().max() < 1e-5


@torch.inference_mode()
def test_no_input_is_dead(checkpoint: WorldCheckpoint) -> None:
    stage = load(checkpoint, range(4))

    def flow(
        latents: int = 0, condition: int = 1, control: int = 2, text: int = 3, timestep: int = 825, frame: int = 0
    ) -> Tensor:
        ring = ring_of(stage, GLOBAL)
        for chunk in range(frame // 2 + 1):
            ring.begin(chunk)
        inputs = stage.chunk_inputs(draw(1, 384, 2, 8, 12, seed=control), rotary_table(frame, GRID, 16))
        hidden = stage.embed(draw(1, 16, 2, 8, 12, seed=latents), draw(1, 20, 2, 8, 12, seed=condition))
        return stage(hidden, stage.time(timestep), inputs, stage.text_kv(draw(5, 48, seed=text)), ring)

    base = flow()
    for change in ({"latents": 9}, {"condition": 9}, {"control": 9}, {"text": 9}, {"timestep": 826}, {"frame": 2}):
        assert (flow(**change) - base).abs().max() > 1e-3, change


@torch.inference_mode()
def test_a_long_prompt_and_a_wrong_control_are_refused(checkpoint: WorldCheckpoint) -> None:
    stage = load(checkpoint, range(1))
    with pytest.raises(ValueError, match=r"text: got \[17, 48\], expected at most \[16, 48\]"):
        stage.text_kv(torch.zeros(17, 48))
    with pytest.raises(ValueError, match="control: got 448 channels, expected 384"):
        stage.chunk_inputs(torch.zeros(1, 448, 2, 8, 12), rotary_table(0, GRID, 16))
