"""What the memory plan says of a benchmarked gang, to be laid beside what it took."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from app.config import Placement, Topology, VideoLimits, VideoModel
from app.jobs.bench.topologies import TopologyResult
from app.jobs.bench.video_shape import VideoShape
from deployments.wan.checkpoint import open_checkpoint
from deployments.wan.memory_plan import GIB, plan_memory


def planned_bytes(
    folder: str,
    dtype: Literal["float32", "bfloat16"],
    pp: int,
    cfg: int,
    in_flight: int,
    shapes: Sequence[VideoShape],
    max_sequence_length: int,
) -> tuple[int, ...]:
    """Bytes of tensors by rank for the largest of the shapes: weights, requests and activations, not the runtime."""
    largest = max(shapes, key=lambda shape: shape.tokens)
    limits = VideoLimits(
        max_pixels=largest.width * largest.height, max_frames=largest.frames, max_sequence_length=max_sequence_length
    )
    topology = Topology.model_validate({"pp": pp, "cfg": cfg, "requests_in_flight": in_flight})
    placement = Placement(gpus=1)
    model = VideoModel(name="bench", checkpoint=folder, dtype=dtype, topology=topology, ranks=placement, limits=limits)
    needs = plan_memory(open_checkpoint(folder), model).needs
    return tuple(need.total - need.runtime for need in needs if need.process.startswith("rank "))


def format_memory(results: Sequence[TopologyResult], planned: dict[str, tuple[int, ...]]) -> str:
    """Lines of peak and plan by rank.  planned: by topology name."""
    lines = ["largest sum of tensors on a GPU, GiB by rank (planned):"]
    for result in results:
        pairs = zip(result.peak_bytes, planned[result.name], strict=True)
        lines.append(
            f"{result.name:9}" + "  ".join(f"{(peak or 0) / GIB:.2f} ({plan / GIB:.2f})" for peak, plan in pairs)
        )
    return "\n".join(lines)
