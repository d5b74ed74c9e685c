"""From a checkpoint and a block range to the stage of each expert."""

from __future__ import annotations

import torch

from deployments.wan.checkpoint import WanCheckpoint, load_expert
from deployments.wan.stage import WanStage


def load_stages(
    checkpoint: WanCheckpoint,
    blocks: range,
    dtype: torch.dtype,
    device: torch.device,
    *,
    compile_blocks: bool = False,
) -> tuple[WanStage, ...]:
    """The stage that holds `blocks`, for each expert in turn; the range alone says whether it is the first or last."""
    first, last = blocks.start == 0, blocks.stop == checkpoint.num_blocks
    return tuple(
        WanStage(
            load_expert(checkpoint, expert, blocks, first=first, last=last, dtype=dtype, device=device),
            dtype,
            first=first,
            last=last,
            compile_blocks=compile_blocks,
        )
        for expert in checkpoint.experts
    )
