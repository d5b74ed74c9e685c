"""Topology changes nothing: every way to cut a model gives the bits of diffusers' `WanPipeline`."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch
from diffusers import UniPCMultistepScheduler, WanPipeline
from safetensors.torch import load_file
from torch import Tensor

from deployments.wan.solver_spec import SolverSpec
from deployments.wan.solver_state import SolverState, restarted_state
from tests.checkpoints import write_wan_checkpoint
from tests.gangs import Ask, GangSpec, run_gang

SHAPE = (1, 16, 2, 4, 6)  # 5 frames of 32x48 pixels
STEPS = 5
TOPOLOGIES = [(1, 1), (1, 2), (2, 1), (2, 2), (3, 1), (4, 1), (4, 2)]


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """The reference runs in this process; its sums must be split as those of one-thread ranks."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_wan_checkpoint(tmp_path_factory.mktemp("wan"), num_blocks=5))


@pytest.fixture(scope="module")
def two_experts(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_wan_checkpoint(tmp_path_factory.mktemp("wan22"), num_blocks=4, experts=2))


@cache
@torch.no_grad()  # as the pipeline's own call: with gradients the text encoder takes another path, an ulp away
def reference(
    folder: str,
    dtype: torch.dtype,
    prompt: str,
    seed: int = 0,
    guidance: tuple[float, float] = (5.0, 5.0),
    steps: int = STEPS,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Latents of `WanPipeline` and the embeddings it used."""
    pipeline = WanPipeline.from_pretrained(folder, dtype=dtype)
    pipeline.set_progress_bar_config(disable=True)
    pipeline.scheduler = UniPCMultistepScheduler.from_config(pipeline.scheduler.config, flow_shift=3.0)
    positive, negative = pipeline.encode_prompt(prompt, "", max_sequence_length=32, dtype=dtype)
    two = {"guidance_scale_2": guidance[1]} if pipeline.config.boundary_ratio is not None else {}
    out = pipeline(
        prompt=prompt,
        negative_prompt="",
        height=32,
        width=48,
        num_frames=5,
        num_inference_steps=steps,
        guidance_scale=guidance[0],
        max_sequence_length=32,
        generator=torch.Generator("cpu").manual_seed(seed),
        output_type="latent",
        **two,
    )
    text = {"positive": positive}
    if guidance[0] > 1:
        text["negative"] = negative
    return out.frames, text


def ask(folder: str, dtype: torch.dtype, prompt: str, job: str, **fields) -> tuple[Ask, Tensor]:
    """The request and the latents it must give."""
    same = {k: fields[k] for k in ("seed", "guidance", "steps") if k in fields}
    latents, text = reference(folder, dtype, prompt, **same)
    return Ask(job, text, SHAPE, **{"steps": STEPS, **fields}), latents


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("pp", "cfg"), TOPOLOGIES)
def test_latents_equal_wan_pipeline_bit_for_bit(folder: str, tmp_path: Path, pp: int, cfg: int, dtype: torch.dtype):
    # Two requests interleaved, then one alone: neighbours must not show.
    first, want_first = ask(folder, dtype, "a red circle moving left", "first")
    second, want_second = ask(folder, dtype, "a small blue square", "second", seed=7, steps=3)
    third, want_third = ask(folder, dtype, "a green triangle", "third", guidance=(1.0, 1.0))
    got = run_gang(GangSpec(folder, pp, cfg, dtype=dtype), [[first, second], [third]], tmp_path)
    assert torch.equal(got["first"], want_first)
    assert torch.equal(got["second"], want_second)
    assert torch.equal(got["third"], want_third)


def test_any_split_gives_the_same_bits(folder: str, tmp_path: Path):
    request, want = ask(folder, torch.float32, "a red circle moving left", "job")
    for split in ((1, 4), (4, 1)):
        got = run_gang(GangSpec(folder, 2, split=split), [[request]], tmp_path)
        assert torch.equal(got["job"], want)


@pytest.mark.parametrize(("pp", "cfg"), [(1, 1), (2, 2)])
def test_two_experts_equal_wan_pipeline(two_experts: str, tmp_path: Path, pp: int, cfg: int):
    request, want = ask(two_experts, torch.float32, "a red circle moving left", "job", guidance=(4.0, 3.0), steps=8)
    got = run_gang(GangSpec(two_experts, pp, cfg), [[request]], tmp_path)
    assert torch.equal(got["job"], want)


@pytest.mark.parametrize(("pp", "cfg"), [(1, 1), (2, 2)])
def test_a_saved_solver_state_continues_bit_for_bit(folder: str, tmp_path: Path, pp: int, cfg: int):
    states = tmp_path / "states"
    states.mkdir()
    request, want = ask(folder, torch.float32, "a red circle moving left", "job", checkpoint_every=2)
    spec = GangSpec(folder, pp, cfg, states=str(states))
    got = run_gang(spec, [[request]], tmp_path)
    assert torch.equal(got["job"], want)
    assert sorted(p.name for p in states.iterdir()) == ["job-002", "job-004", "job-005"]  # the last one always
    for saved in ("job-002", "job-004"):
        resume = SolverState.from_bytes((states / saved).read_bytes())
        later = Ask("later", request.text, SHAPE, steps=STEPS, resume=resume)
        got = run_gang(GangSpec(folder, pp, cfg), [[later]], tmp_path)
        assert torch.equal(got["later"], want), saved


@pytest.mark.parametrize(("pp", "cfg"), [(1, 1), (2, 2)])
def test_donor_latents_are_those_entering_the_wanted_steps(folder: str, tmp_path: Path, pp: int, cfg: int):
    states = tmp_path / "states"
    states.mkdir()
    request, want = ask(
        folder, torch.float32, "a red circle moving left", "job", checkpoint_every=2, donor_steps=(2, 3)
    )
    plain, want_plain = ask(folder, torch.float32, "a green triangle", "plain")
    got = run_gang(GangSpec(folder, pp, cfg, states=str(states)), [[request, plain]], tmp_path)
    assert torch.equal(got["job"], want)
    assert torch.equal(got["plain"], want_plain)
    stored = {p.name for p in states.iterdir() if "donor" in p.name}
    assert stored == {"job-donor-0002.safetensors", "job-donor-0003.safetensors"}  # nothing of the plain one
    entering_2 = load_file(states / "job-donor-0002.safetensors")["latents"]
    assert torch.equal(entering_2, SolverState.from_bytes((states / "job-002").read_bytes()).latents)
    # Another request starts from them: its solver's order begins anew.
    solver = request.submission(GangSpec(folder), None).spec["task"]["solver"]
    resume = restarted_state(2, entering_2, SolverSpec(**solver))
    got = run_gang(
        GangSpec(folder, pp, cfg), [[Ask("warm", request.text, SHAPE, steps=STEPS, resume=resume)]], tmp_path
    )
    # Same prompt, other history: near, as the solver's order makes a small difference, and not equal.
    assert not torch.equal(got["warm"], want)
    assert (got["warm"] - want).norm() / want.norm() < 0.2


@pytest.mark.parametrize(("pp", "cfg"), [(1, 1), (1, 2), (2, 2)])
def test_a_cancelled_request_leaves_nothing_behind(folder: str, tmp_path: Path, pp: int, cfg: int):
    cancelled, _ = ask(folder, torch.float32, "a small blue square", "gone", seed=3, cancel_after=2)
    request, want = ask(folder, torch.float32, "a red circle moving left", "job")
    after, want_after = ask(folder, torch.float32, "a green triangle", "after", seed=9)
    got = run_gang(GangSpec(folder, pp, cfg), [[cancelled, request], [after]], tmp_path)
    assert set(got) == {"job", "after"}
    assert torch.equal(got["job"], want)
    assert torch.equal(got["after"], want_after)
