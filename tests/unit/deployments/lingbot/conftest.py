"""One small model for all tests of worlds; a thread, so that sums have one order."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from deployments.lingbot.checkpoint import WorldCheckpoint, open_world_checkpoint
from tests.world_checkpoints import write_world_checkpoint


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def world_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_world_checkpoint(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="session")
def checkpoint(world_folder: Path) -> WorldCheckpoint:
    return open_world_checkpoint(world_folder)
