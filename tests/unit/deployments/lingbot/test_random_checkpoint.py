"""Random releases: real layouts, read by the real loaders, and no path through them dead."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from deployments.lingbot.checkpoint import open_world_checkpoint, world_fingerprints
from deployments.lingbot.dit_config import tensor_shapes
from deployments.lingbot.random_checkpoint import RELEASES, SMALL, write_random_release
from deployments.lingbot.text_encoder import WorldTextEncoder

CPU = torch.device("cpu")


def parameters(name: str) -> int:
    return sum(torch.Size(shape).numel() for shape in tensor_shapes(RELEASES[name].config).values())


def test_sizes() -> None:
    assert parameters("small") == 444_352
    assert parameters("1.3b") == pytest.approx(1.71e9, rel=1e-3)  # "1.710 B" by the design page
    assert len(tensor_shapes(RELEASES["1.3b"].config)) == 21 + 30 * 35


@pytest.mark.parametrize("name", RELEASES)
def test_a_release_stands_alone_in_its_folder_and_is_written_whole(name: str, tmp_path: Path) -> None:
    """Of the large one the layout alone: its sizes would take a minute."""
    release = replace(RELEASES[name], config=SMALL, vae_base_dim=8)
    write_random_release(tmp_path / "a", release, dtype=torch.bfloat16)
    write_random_release(tmp_path / "b", release, dtype=torch.bfloat16)
    write_random_release(tmp_path / "c", release, dtype=torch.bfloat16, seed=1)
    a, b, c = (world_fingerprints(open_world_checkpoint(tmp_path / folder)) for folder in "abc")
    assert a == b
    assert not any(a[part] == c[part] for part in a if part != "text_encoder")
    checkpoint = open_world_checkpoint(tmp_path / "a")
    assert (checkpoint.layout, checkpoint.config) == (release.layout, SMALL)
    assert {x.dtype for x in checkpoint.tensors.values()} == {torch.bfloat16}
    assert len({x.file for x in checkpoint.tensors.values()}) == release.shards
    with pytest.raises(OSError, match="not empty"):
        write_random_release(tmp_path / "a", release, dtype=torch.bfloat16)


def test_unknown_words_are_spelled(world_folder: Path) -> None:
    encoder = WorldTextEncoder(world_folder, 16, torch.float32, CPU)
    lengths = {prompt: len(encoder.encode(prompt)) for prompt in ("a forest", "a fo", "a ox", "a xo")}
    assert lengths == {"a forest": 3, "a fo": 4, "a ox": 4, "a xo": 4}
    assert not torch.equal(encoder.encode("a ox"), encoder.encode("a xo"))
