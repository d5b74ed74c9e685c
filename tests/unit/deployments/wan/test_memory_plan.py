"""The memory plan: exact parts against loaded weights and live tensors, estimates against measured peaks."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKLWan, UniPCMultistepScheduler
from transformers import UMT5Config, UMT5EncoderModel

from app.config import VideoModel
from deployments.wan.activation_memory import (
    decoder_activations,
    stage_activations,
    text_encoder_activations,
)
from deployments.wan.checkpoint import WanCheckpoint, load_expert, open_checkpoint, split_blocks
from deployments.wan.memory_plan import GIB, HOST, MemoryPlan, ModelTooBig, Need, plan_memory
from deployments.wan.stage import WanStage
from tests.allocations import peak_bytes
from tests.checkpoints import write_hollow_checkpoint, write_wan_checkpoint

CPU = torch.device("cpu")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> WanCheckpoint:
    return open_checkpoint(str(write_wan_checkpoint(tmp_path_factory.mktemp("one"), num_blocks=4)))


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> WanCheckpoint:
    return open_checkpoint(str(write_wan_checkpoint(tmp_path_factory.mktemp("two"), num_blocks=4, experts=2)))


def served(**fields: Any) -> VideoModel:
    limits = {"max_pixels": 64 * 64, "max_frames": 9, "max_sequence_length": 16}
    return VideoModel(**{"name": "m", "checkpoint": "c", "limits": limits, "dtype": "float32", **fields})


def need(plan: MemoryPlan, process: str) -> Need:
    return next(need for need in plan.needs if need.process == process)


# Exact parts.


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("pp", "cfg", "split"), [(1, 1, None), (1, 2, None), (3, 1, None), (2, 2, (1, 3))])
def test_weights_of_a_rank_are_those_of_both_experts_stages(
    two: WanCheckpoint, dtype: str, pp: int, cfg: int, split: tuple[int, ...] | None
) -> None:
    plan = plan_memory(two, served(dtype=dtype, topology={"pp": pp, "cfg": cfg, "split": split}))
    assert [n.process for n in plan.needs] == [f"rank {i}" for i in range(pp * cfg)] + ["text encoder", "decoder"]
    for rank in range(pp * cfg):
        stage = rank % pp
        blocks = split_blocks(4, pp, split)[stage]
        ends = {"first": stage == 0, "last": stage == pp - 1}
        models = [load_expert(two, e, blocks, **ends, dtype=DTYPES[dtype], device=CPU) for e in two.experts]
        held = sum(parameter.nbytes for model in models for parameter in model.parameters())
        assert need(plan, f"rank {rank}").weights == held


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cfg", [1, 2])
def test_what_a_request_keeps_is_counted(two: WanCheckpoint, dtype: str, cfg: int) -> None:
    kept = 0
    for expert in two.experts:
        model = load_expert(two, expert, range(4), first=True, last=True, dtype=DTYPES[dtype], device=CPU)
        stage = WanStage(model, DTYPES[dtype], first=True, last=True)
        # 9 frames of 64 x 64 pixels, the limits of `served`.
        conditioning = stage.prepare(torch.zeros(1, 16, 32), (1, 16, 3, 8, 8))
        kept += sum(tensor.nbytes for pair in (*conditioning.text, conditioning.rotary) for tensor in pair)
    kept *= 3 - cfg  # branches of a chain
    one_request, three = (
        need(plan_memory(two, served(dtype=dtype, topology={"cfg": cfg, "requests_in_flight": n})), "rank 0").requests
        for n in (1, 3)
    )
    assert three == 3 * one_request
    latents = 16 * 3 * 8 * 8 * 4
    # The solver's share is 16 of its fp32 latents: see the next test.
    assert one_request - kept == 16 * latents


def test_sixteen_latents_are_enough_for_the_solver() -> None:
    shape = (1, 16, 3, 64, 64)
    latents_bytes = 16 * 3 * 64 * 64 * 4

    def run() -> torch.Tensor:
        scheduler = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0)
        scheduler.set_timesteps(6)
        latents = torch.zeros(shape)
        for t in scheduler.timesteps:
            positive, negative = torch.ones(shape), torch.ones(shape)
            latents = scheduler.step(negative + 5.0 * (positive - negative), t, latents, return_dict=False)[0]
        return latents

    # History, last sample, latents, predictions and temporaries; the timestep tables are small beside them.
    assert 12 * latents_bytes < peak_bytes(run) <= 16 * latents_bytes


def test_stages_pass_hidden_states_on_and_a_single_one_does_not(one: WanCheckpoint) -> None:
    whole = need(plan_memory(one, served(topology={"requests_in_flight": 1})), "rank 0").requests
    halves = plan_memory(one, served(topology={"pp": 2, "requests_in_flight": 1}))
    text_of_two_blocks = 2 * (2 * 2 * 16 * 48 * 4)  # branches, blocks, key and value, 16 tokens of 48 fp32 values
    hidden = 2 * (3 * 4 * 4) * 48 * 4  # branches, tokens
    assert need(halves, "rank 1").requests == whole - text_of_two_blocks + hidden


def test_services_hold_the_whole_component(one: WanCheckpoint) -> None:
    plan = plan_memory(one, served(dtype="bfloat16"))
    vae = AutoencoderKLWan.from_pretrained(one.folder / "vae")
    text = UMT5EncoderModel.from_pretrained(one.folder / "text_encoder", dtype=torch.bfloat16)
    # The decoder has a dtype of its own, float32 unless set.
    assert need(plan, "decoder").weights == sum(parameter.nbytes for parameter in vae.parameters())
    assert need(plan, "text encoder").weights == sum(parameter.nbytes for parameter in text.parameters())


# Estimates.  Each test states how far the formula may be from the measurement.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("ffn_dim", "blocks"), [(96, 2), (384, 4), (576, 2)])
def test_stage_activations_are_measured(tmp_path: Path, dtype: torch.dtype, ffn_dim: int, blocks: int) -> None:
    checkpoint = open_checkpoint(
        str(write_wan_checkpoint(tmp_path, num_blocks=blocks, heads=2, head_dim=48, ffn_dim=ffn_dim))
    )
    model = load_expert(checkpoint, "transformer", range(blocks), first=True, last=True, dtype=dtype, device=CPU)
    stage = WanStage(model, dtype, first=True, last=True)
    latents = torch.randn(1, 16, 3, 48, 48)
    with torch.inference_mode():
        conditioning, time = stage.prepare(torch.zeros(1, 16, 32), latents.shape), stage.time(torch.tensor([500]))
        measured = peak_bytes(lambda: stage(latents, conditioning, time))
    # 2 %: modulation vectors and attention's scratch, which do not grow with the tokens, are left out.
    assert stage_activations(3 * 24 * 24, 96, ffn_dim, dtype) == pytest.approx(measured, rel=0.02)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("base_dim", "residual_blocks", "latent_frames"), [(8, 1, 2), (16, 1, 4), (8, 3, 2)])
def test_decoder_activations_bound_the_measurement(
    dtype: torch.dtype, base_dim: int, residual_blocks: int, latent_frames: int
) -> None:
    vae = AutoencoderKLWan(base_dim=base_dim, num_res_blocks=residual_blocks)
    for parameter in vae.parameters():
        parameter.data = parameter.data.to(dtype)
    latents = torch.randn(1, 16, latent_frames, 8, 8, dtype=dtype)
    with torch.inference_mode():
        measured = peak_bytes(lambda: vae.decode(latents, return_dict=False)[0])
    planned = decoder_activations(64 * 64, 4 * latent_frames - 3, base_dim, residual_blocks, dtype, "cpu")
    # Whether a convolution unfolds its input is oneDNN's choice: without it about a third of the plan is used.
    assert 0.3 * planned < measured <= planned
    assert planned > decoder_activations(64 * 64, 4 * latent_frames - 3, base_dim, residual_blocks, dtype, "cuda")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("width", "heads", "tokens"), [(128, 4, 256), (256, 2, 64), (64, 16, 256)])
def test_text_encoder_activations_bound_the_measurement(
    dtype: torch.dtype, width: int, heads: int, tokens: int
) -> None:
    config = UMT5Config(vocab_size=50, d_model=width, d_kv=32, d_ff=4 * width, num_layers=2, num_heads=heads)
    model = UMT5EncoderModel(config).eval().to(dtype)
    ids = torch.zeros(1, tokens, dtype=torch.int64)
    with torch.inference_mode():
        measured = peak_bytes(lambda: model(ids, torch.ones_like(ids)).last_hidden_state)
    planned = text_encoder_activations(tokens, config.to_dict(), dtype)
    # Wide heads make the scores' share small and the estimate loose: the part is a few per cent of its weights.
    assert 0.3 * planned < measured <= planned


# The table, and what it refuses.


def test_real_sizes_are_planned_from_headers(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(
        str(write_hollow_checkpoint(tmp_path, experts=2, num_blocks=40, heads=40, ffn_dim=13824))
    )
    limits = {"max_pixels": 1280 * 720, "max_frames": 81}
    on_gpu = {"ranks": {"gpus": 1}, "decoder": {"gpus": 1}, "text_encoder": {"gpus": 1}}
    plan = plan_memory(checkpoint, served(dtype="bfloat16", topology={"pp": 2, "cfg": 2}, limits=limits, **on_gpu))
    first = need(plan, "rank 0")
    # Half of 2 x 14.3 billion bf16 parameters: 26.6 GiB, and both stages' condition embedders.
    assert first.weights / GIB == pytest.approx(27.1, abs=0.2)
    # 21 latent frames of 90 x 160, patches of 2 x 2: 75,600 tokens, 24 bytes a value of width 5120, times 1.2.
    assert "(75600 tokens)" in plan.workload
    assert first.activations == pytest.approx(1.2 * 24 * 75_600 * 5120, rel=1e-6)
    assert need(plan, "text encoder").weights / GIB == pytest.approx(10.6, abs=0.1)  # UMT5-XXL, 5.7 billion
    plan.refuse_if_too_big({"rank 0": 80 * GIB, "decoder": 80 * GIB})
    with pytest.raises(
        ModelTooBig, match=r"^rank 3: \d+\.\d\d GiB needed, 24.00 GiB available\. For rank 3: raise topology.pp"
    ):
        plan.refuse_if_too_big({"rank 3": 24 * GIB})


def example() -> MemoryPlan:
    return MemoryPlan(
        workload="a request",
        needs=(
            Need("rank 0", 2, "cuda", 3 * GIB, GIB, 2 * GIB, "buy memory"),
            Need("text encoder", 1, "cpu", GIB, 0, GIB // 4, "cut the text"),
            Need("decoder", 3, "cpu", GIB // 4, 0, GIB, "cut the video"),
        ),
    )


def test_table() -> None:
    assert example().format({HOST: 8 * GIB}).splitlines() == [
        "memory plan, GiB a process: a request",
        "process       device  weights  requests  activations  runtime  needed  available",
        "rank 0 x 2    cuda       3.00      1.00         2.00     1.50    7.50",
        "text encoder  cpu        1.00      0.00         0.25     0.50    1.75",
        "decoder x 3   cpu        0.25      0.00         1.00     0.50    1.75",
        "together      cpu                                                7.00       8.00",
    ]


def test_processes_on_the_host_share_it_and_those_on_gpus_do_not() -> None:
    assert example().needed(HOST) == 7 * GIB
    assert example().needed("rank 0") == 7.5 * GIB
    with pytest.raises(ValueError, match=r"pool: got 'decoder', expected one of \['host', 'rank 0'\]"):
        example().needed("decoder")


def test_what_fits_passes_and_one_byte_less_is_refused_with_the_table_and_the_cure() -> None:
    plan = example()
    plan.refuse_if_too_big({HOST: 7 * GIB, "rank 0": 7 * GIB + GIB // 2})
    with pytest.raises(ModelTooBig) as refusal:
        plan.refuse_if_too_big({"rank 0": 8 * GIB, HOST: 7 * GIB - 1})
    assert str(refusal.value).startswith("host: 7.00 GiB needed, 7.00 GiB available. For decoder: cut the video\n")
    assert plan.format({"rank 0": 8 * GIB, HOST: 7 * GIB - 1}) in str(refusal.value)


def test_a_plan_travels_to_the_ranks(one: WanCheckpoint) -> None:
    plan = plan_memory(one, served())
    assert pickle.loads(pickle.dumps(plan)) == plan
