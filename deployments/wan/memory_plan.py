"""Memory of every process that serves a model, before any of them takes it.

A process needs its weights (exact, from the tensor headers), what the requests in flight keep between steps, the
activations of one forward pass (`activation_memory`), and what its runtime takes.  The largest request that the limits
allow is assumed.  Not planned: the ingress, the driver, Ray itself, and host memory of processes on a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from deployments.wan.activation_memory import (
    Device,
    decoder_activations,
    stage_activations,
    text_encoder_activations,
)
from deployments.wan.checkpoint import WanCheckpoint, split_blocks

GIB = 2**30

SLACK = 1.2
"""Times the activations, for workspaces of CUDA's convolutions and for what allocators keep."""

RUNTIME_BYTES = {"cpu": GIB // 2, "cuda": 3 * GIB // 2}
"""cpu: resident size of Python with torch, diffusers and ray (0.47 GiB measured).  cuda: context, cuBLAS and NCCL."""

SOLVER_LATENTS = 16
"""fp32 tensors of the latents' size at the peak of a solver step, predictions included; 14 measured with UniPC."""

HOST = "host"
"""The pool of all processes on CPUs."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class ModelTooBig(RuntimeError):
    """A model needs more memory than its device has; the message holds the plan and the cure."""


class Topology(Protocol):
    """How the model is spread; `app.config.Topology` is one."""

    @property
    def pp(self) -> int: ...
    @property
    def cfg(self) -> int: ...
    @property
    def split(self) -> tuple[int, ...] | None: ...
    @property
    def gangs(self) -> int: ...
    @property
    def requests_in_flight(self) -> int: ...


class Placement(Protocol):
    """Where the processes of a role run: on a GPU if `gpus` is above 0."""

    @property
    def gpus(self) -> float: ...


class Service(Placement, Protocol):
    """Text encoder or decoder."""

    @property
    def replicas(self) -> int: ...


class Decoder(Service, Protocol):
    """The VAE's decoder, which has a dtype of its own."""

    @property
    def dtype(self) -> str: ...


class Limits(Protocol):
    """The largest request."""

    @property
    def max_pixels(self) -> int: ...
    @property
    def max_frames(self) -> int: ...
    @property
    def max_sequence_length(self) -> int: ...


class ServedVideo(Protocol):
    """What memory depends on, besides the checkpoint; `app.config.VideoModel` is one."""

    @property
    def dtype(self) -> str: ...
    @property
    def topology(self) -> Topology: ...
    @property
    def ranks(self) -> Placement: ...
    @property
    def text_encoder(self) -> Service: ...
    @property
    def decoder(self) -> Decoder: ...
    @property
    def limits(self) -> Limits: ...


@dataclass(frozen=True)
class Need:
    """Memory of one process, bytes."""

    process: str
    """"rank 0" and so on, "text encoder" or "decoder"."""
    copies: int
    """Processes like it: gangs or replicas."""
    device: Device
    weights: int
    requests: int
    """What the requests in flight hold between steps."""
    activations: int
    cure: str
    """What makes it smaller."""

    @property
    def runtime(self) -> int:
        """What the libraries take before anything is loaded."""
        return RUNTIME_BYTES[self.device]

    @property
    def total(self) -> int:
        """Of one copy."""
        return self.weights + self.requests + self.activations + self.runtime

    @property
    def pool(self) -> str:
        """What it shares memory with: `HOST`, or on a GPU its own name."""
        return HOST if self.device == "cpu" else self.process


@dataclass(frozen=True)
class MemoryPlan:
    """Needs of all processes of one model."""

    workload: str
    """The request and the topology that were assumed, in words."""
    needs: tuple[Need, ...]

    def needed(self, pool: str) -> int:
        """Bytes that the processes of a pool need together; on a GPU those of one process."""
        members = [need for need in self.needs if need.pool == pool]
        if not members:
            raise ValueError(f"pool: got {pool!r}, expected one of {sorted({need.pool for need in self.needs})}")
        return sum(need.total * (need.copies if pool == HOST else 1) for need in members)

    def format(self, available: Mapping[str, int] | None = None) -> str:
        """A table in GiB.  available: free bytes by pool, for the last column."""
        free = {pool: _gib(size) for pool, size in (available or {}).items()}
        rows = [["process", "device", "weights", "requests", "activations", "runtime", "needed", "available"]]
        for need in self.needs:
            parts = (need.weights, need.requests, need.activations, need.runtime, need.total)
            name = need.process if need.copies == 1 else f"{need.process} x {need.copies}"
            rows.append([name, need.device, *map(_gib, parts), "" if need.pool == HOST else free.get(need.pool, "")])
        if any(need.pool == HOST for need in self.needs):
            rows.append(["together", "cpu", *[""] * 4, _gib(self.needed(HOST)), free.get(HOST, "")])
        return f"memory plan, GiB a process: {self.workload}\n{_table(rows)}"

    def refuse_if_too_big(self, available: Mapping[str, int]) -> None:
        """available: free bytes by pool, of as many pools as are known; raises `ModelTooBig` if one is too small."""
        for pool, free in available.items():
            if (needed := self.needed(pool)) > free:
                largest = max((n for n in self.needs if n.pool == pool), key=lambda n: n.total * n.copies)
                raise ModelTooBig(
                    f"{pool}: {_gib(needed)} GiB needed, {_gib(free)} GiB available. "
                    f"For {largest.process}: {largest.cure}\n{self.format(available)}"
                )


def plan_memory(checkpoint: WanCheckpoint, model: ServedVideo) -> MemoryPlan:
    """The plan of one served model; reads nothing but the headers that the checkpoint already holds."""
    topology, limits = model.topology, model.limits
    stride = checkpoint.vae_config["scale_factor_temporal"]
    side = checkpoint.vae_config["scale_factor_spatial"]
    frames = (limits.max_frames - 1) // stride + 1
    cells = -(-limits.max_pixels // side**2)  # latent pixels of a frame
    patch = checkpoint.transformer_config("transformer")["patch_size"]
    tokens = -(-frames * cells // (patch[0] * patch[1] * patch[2]))
    return MemoryPlan(
        workload=(
            f"requests up to {limits.max_pixels} pixels x {limits.max_frames} frames ({tokens} tokens), "
            f"{limits.max_sequence_length} text tokens, {topology.requests_in_flight} in flight, "
            f"pp {topology.pp}, cfg {topology.cfg}, {model.dtype}"
        ),
        needs=(
            *_ranks(checkpoint, model, tokens, latents=checkpoint.vae_config["z_dim"] * frames * cells),
            _text_encoder(checkpoint, model),
            _decoder(checkpoint, model),
        ),
    )


def _ranks(checkpoint: WanCheckpoint, model: ServedVideo, tokens: int, latents: int) -> list[Need]:
    """latents: values of one request's latents."""
    topology, dtype = model.topology, DTYPES[model.dtype]
    config = checkpoint.transformer_config("transformer")
    head_dim = config["attention_head_dim"]
    width = config["num_attention_heads"] * head_dim
    branches = 2 // topology.cfg  # of a chain
    solver = SOLVER_LATENTS * 4 * latents
    needs = []
    for rank in range(topology.pp * topology.cfg):
        stage = rank % topology.pp
        blocks = split_blocks(checkpoint.num_blocks, topology.pp, topology.split)[stage]
        ends = {"first": stage == 0, "last": stage == topology.pp - 1}
        text = 2 * len(blocks) * model.limits.max_sequence_length * width * dtype.itemsize
        rotary = 2 * tokens * head_dim * 4
        # A hidden state that waits to be sent or taken up.
        passing = tokens * width * dtype.itemsize if topology.pp > 1 else 0
        request = solver + branches * (len(checkpoint.experts) * (text + rotary) + passing)
        needs.append(
            Need(
                process=f"rank {rank}",
                copies=topology.gangs,
                device=_device(model.ranks),
                weights=sum(checkpoint.stage_bytes(e, blocks, **ends, dtype=dtype) for e in checkpoint.experts),
                requests=topology.requests_in_flight * request,
                activations=int(SLACK * stage_activations(tokens, width, config["ffn_dim"], dtype)),
                cure="raise topology.pp, lower limits.max_pixels, limits.max_frames or topology.requests_in_flight, "
                "set dtype to bfloat16, or use a larger GPU",
            )
        )
    return needs


def _text_encoder(checkpoint: WanCheckpoint, model: ServedVideo) -> Need:
    dtype = DTYPES[model.dtype]
    peak = text_encoder_activations(model.limits.max_sequence_length, checkpoint.configs["text_encoder"], dtype)
    return Need(
        process="text encoder",
        copies=model.text_encoder.replicas,
        device=_device(model.text_encoder),
        weights=checkpoint.component_bytes("text_encoder", dtype),
        requests=0,
        activations=int(SLACK * peak),
        cure="set dtype to bfloat16, or move it (text_encoder.gpus) to where there is more memory",
    )


def _decoder(checkpoint: WanCheckpoint, model: ServedVideo) -> Need:
    dtype, device, vae = DTYPES[model.decoder.dtype], _device(model.decoder), checkpoint.vae_config
    peak = decoder_activations(
        model.limits.max_pixels,
        model.limits.max_frames,
        vae["decoder_base_dim"] or vae["base_dim"],
        vae["num_res_blocks"],
        dtype,
        device,
    )
    return Need(
        process="decoder",
        copies=model.decoder.replicas,
        device=device,
        weights=checkpoint.component_bytes("vae", dtype),
        requests=0,
        activations=int(SLACK * peak),
        cure="lower limits.max_pixels or limits.max_frames, set decoder.dtype to bfloat16, or move it (decoder.gpus) "
        "to where there is more memory",
    )


def _device(placement: Placement) -> Device:
    return "cuda" if placement.gpus > 0 else "cpu"


def _gib(size: int) -> str:
    return f"{size / GIB:.2f}"


def _table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    # Names on the left of their column, numbers on the right.
    lines = ["  ".join(f"{cell:{'<' if i < 2 else '>'}{widths[i]}}" for i, cell in enumerate(row)) for row in rows]
    return "\n".join(line.rstrip() for line in lines)
