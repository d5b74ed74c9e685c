"""Compiled blocks: one graph a shape for all blocks, and never a silent way back to eager."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partialmethod
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._dynamo.exc import FailOnRecompileLimitHit
from torch._dynamo.utils import counters

from deployments.wan import stage as stage_module
from deployments.wan.checkpoint import load_expert, open_checkpoint
from deployments.wan.stage import WanStage
from tests.checkpoints import write_wan_checkpoint


@pytest.fixture(autouse=True)
def traced_only(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Graphs are made as ever, but run op by op: generating code takes seconds a shape and is torch's affair."""
    monkeypatch.setattr(nn.Module, "compile", partialmethod(nn.Module.compile, backend="eager"))
    torch._dynamo.reset()
    counters.clear()
    with torch._dynamo.config.patch(recompile_limit=8, fail_on_recompile_limit_hit=False):  # put back afterwards
        yield
    torch._dynamo.reset()


def build(folder: Path, compile_blocks: bool) -> WanStage:
    checkpoint = open_checkpoint(str(folder))
    ends = {"first": True, "last": True}
    blocks = range(checkpoint.num_blocks)
    model = load_expert(checkpoint, "transformer", blocks, **ends, dtype=torch.float32, device=torch.device("cpu"))
    return WanStage(model, torch.float32, **ends, compile_blocks=compile_blocks)


@torch.inference_mode()
def run(stage: WanStage, width: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(width)
    latents = torch.randn(1, 16, 2, 4, width, generator=generator)
    conditioning = stage.prepare(torch.randn(1, 8, 32, generator=generator), latents.shape)
    return stage(latents, conditioning, stage.time(torch.tensor([500])))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_wan_checkpoint(tmp_path_factory.mktemp("wan"), num_blocks=3)


def test_every_shape_is_compiled_once_for_all_blocks(folder: Path):
    compiled, eager = build(folder, True), build(folder, False)
    widths = range(4, 22, 2)  # nine, one more than torch would compile by itself
    for _ in range(2):
        for width in widths:
            assert torch.equal(run(compiled, width), run(eager, width))
    assert counters["stats"]["unique_graphs"] == len(widths)
    assert not counters["graph_break"]


def test_a_shape_too_many_is_an_error_not_another_arithmetic(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(stage_module, "MAX_COMPILED_SHAPES", 2)
    compiled = build(folder, True)
    run(compiled, 4)
    run(compiled, 6)
    with pytest.raises(FailOnRecompileLimitHit):
        run(compiled, 8)
    assert run(compiled, 4).isfinite().all()
