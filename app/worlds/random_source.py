"""`random:NAME` as a checkpoint: random weights in the layout of a release, made at the first start.

They show what the service does and how fast, not what a trained world looks like.
"""

from __future__ import annotations

from pathlib import Path

import torch

from deployments.lingbot.random_checkpoint import RELEASES, write_random_release

PREFIX = "random:"
FOLDER = Path("worldstage-data/random-worlds")
"""Within the folder in which the application is started, which every node must then reach."""


def checkpoint_folder(source: str, start_folder: Path) -> Path:
    """The folder of a model's `checkpoint`; a random one is made if it is not there.  Raises ValueError."""
    if not source.startswith(PREFIX):
        return Path(source)
    name = source.removeprefix(PREFIX)
    if name not in RELEASES:
        raise ValueError(f"checkpoint: got {source!r}, expected a folder or one of {PREFIX}{', '.join(RELEASES)}")
    folder = start_folder / FOLDER / name
    if not folder.exists():
        write_random_release(folder, RELEASES[name], dtype=torch.float32 if name == "small" else torch.bfloat16)
    return folder
