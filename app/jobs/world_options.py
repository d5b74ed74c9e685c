"""Command-line options that say which world model a job serves for itself, and how."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from app.jobs.local_world import WorldSetup
from deployments.lingbot.random_checkpoint import RELEASES, write_random_release
from deployments.lingbot.stream_config import PIXEL_MULTIPLE
from deployments.wan.memory_plan import DTYPES

SIZES = {"small": (64, 96), "1.3b": (464, 832)}
"""Height and width in pixels where none are given, by random release."""


def size(text: str) -> tuple[int, int]:
    """``464x832`` to height and width."""
    height, by, width = text.partition("x")
    if not by or not height.isdecimal() or not width.isdecimal():
        raise argparse.ArgumentTypeError(f"got {text!r}, expected height x width in pixels, such as 464x832")
    sides = int(height), int(width)
    if min(sides) < 1 or any(side % PIXEL_MULTIPLE for side in sides):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected multiples of {PIXEL_MULTIPLE} pixels")
    return sides


def add_world_options(parser: argparse.ArgumentParser) -> None:
    """What `setup_of` reads."""
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--checkpoint", type=Path, help="folder of a release")
    model.add_argument("--random", choices=RELEASES, help="write a release of random weights and use it")
    parser.add_argument("--support", type=Path, help="folder of VAE and text encoder, where the release has none")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=DTYPES, help="default: bfloat16 on a GPU, float32 on a CPU")
    parser.add_argument("--vae-dtype", choices=DTYPES, help="default: as --dtype")
    parser.add_argument("--size", type=size, help="default: 464x832; 64x96 for --random small")
    parser.add_argument("--window", type=int, help="latent frames, -1: all; default: as the release was made")
    parser.add_argument("--sink", type=int, help="latent frames")
    parser.add_argument("--chunk", type=int, help="latent frames")
    parser.add_argument("--prompt", default="a room with a red door")
    parser.add_argument("--seed", type=int, default=7)


def setup_of(options: argparse.Namespace, scratch: Path, *, pp: int, max_chunks: int, kv_bytes: int) -> WorldSetup:
    """scratch: where a random release is written, once.  pp, max_chunks, kv_bytes: as in `WorldSetup`."""
    on_gpu = options.device == "cuda"
    dtype = options.dtype or ("bfloat16" if on_gpu else "float32")
    folder = options.checkpoint or random_release(options.random, dtype, on_gpu, scratch)
    height, width = options.size or SIZES.get(options.random, SIZES["1.3b"])
    return WorldSetup(
        folder=folder,
        support=options.support,
        dtype=dtype,
        vae_dtype=options.vae_dtype or dtype,
        on_gpu=on_gpu,
        pp=pp,
        window=options.window,
        sink=options.sink,
        chunk=options.chunk,
        height=height,
        width=width,
        max_chunks=max_chunks,
        kv_bytes=kv_bytes,
    )


def random_release(name: str, dtype: str, on_gpu: bool, scratch: Path) -> Path:
    """The folder of a random release, written unless it is there."""
    folder = scratch / f"random-{name}-{dtype}"
    if not folder.exists():
        device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
        write_random_release(folder, RELEASES[name], dtype=DTYPES[dtype], device=device)
    return folder


def start_image(height: int, width: int) -> torch.Tensor:
    """A picture to start from where none is given: soft color ramps, [H, W, 3] uint8 RGB."""
    rows = torch.linspace(0, 255, height).view(-1, 1).expand(height, width)
    columns = torch.linspace(0, 255, width).view(1, -1).expand(height, width)
    return torch.stack([rows, columns, (rows + columns) / 2], dim=2).round().to(torch.uint8)
