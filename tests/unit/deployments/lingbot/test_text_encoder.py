"""The native text encoder file against transformers' own model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import UMT5EncoderModel

from deployments.lingbot.checkpoint import TEXT_FILE
from deployments.lingbot.random_checkpoint import WORDS, parameter_shapes, random_tensors, text_config
from deployments.lingbot.text_encoder import WorldTextEncoder, clean_prompt
from deployments.wan.checkpoint_files import CheckpointError

CPU = torch.device("cpu")


def test_it_is_transformers_model_on_the_same_weights(world_folder: Path) -> None:
    encoder = WorldTextEncoder(world_folder, 16, torch.float32, CPU)
    # Drawn as `random_checkpoint.write_support` draws it; the file is bf16.
    twin = UMT5EncoderModel(text_config(48)).eval().requires_grad_(False)
    drawn = random_tensors(parameter_shapes(twin), 2, torch.bfloat16, CPU)
    for name, parameter in twin.named_parameters():
        parameter.copy_(drawn[name])
    ids = torch.tensor([[3 + WORDS.index(word) for word in ("a", "red", "circle")] + [1]])  # </s> ends it
    with torch.inference_mode():
        expected = twin(ids).last_hidden_state[0]
    embeddings = encoder.encode("a red circle")
    assert embeddings.shape == (4, 48)
    assert torch.equal(embeddings, expected)


def test_long_prompts_are_cut_and_empty_ones_have_their_end(world_folder: Path) -> None:
    encoder = WorldTextEncoder(world_folder, 16, torch.float32, CPU)
    assert encoder.encode("red " * 40).shape == (16, 48)
    assert encoder.encode("").shape == (1, 48)


def test_a_prompt_has_one_clean_form() -> None:
    assert clean_prompt("  a\n red   circle &amp; more ") == "a red circle & more"


def test_another_file_is_refused(world_folder: Path, tmp_path: Path) -> None:
    state = torch.load(world_folder / TEXT_FILE, weights_only=True)
    for name, message in (("blocks.1.norm2.weight", "layer.1.layer_norm"), ("token_embedding.weight", "shared.weight")):
        torch.save({k: v for k, v in state.items() if k != name}, tmp_path / TEXT_FILE)
        with pytest.raises(CheckpointError, match=rf"not a UMT5 encoder in its native layout: [\s\S]*{message}"):
            WorldTextEncoder(tmp_path, 16, torch.float32, CPU)
