"""Writes the small random world in any release's layout, for the real loaders to read."""

from __future__ import annotations

from pathlib import Path

from deployments.lingbot.random_checkpoint import SMALL, write_support, write_transformer
from deployments.lingbot.stream_config import Layout


def write_world_checkpoint(folder: Path, *, layout: Layout = "v1-fast") -> Path:
    """Writes the release and returns its folder; v2-1.3b has no VAE and no text encoder, as on the hub."""
    write_transformer(folder, layout, SMALL)
    if layout != "v2-1.3b":
        write_support(folder)
    return folder
