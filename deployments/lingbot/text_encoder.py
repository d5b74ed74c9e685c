"""Prompts of worlds to embeddings: the UMT5 encoder of a world release, from its native .pth file.

The prompt is cleaned as diffusers' Wan pipeline does; its embeddings are cut to the prompt's own tokens, and the stages
pad them with zero rows.
"""

from __future__ import annotations

import re
from pathlib import Path

import torch
from diffusers.pipelines.wan.pipeline_wan import prompt_clean
from torch import Tensor
from transformers import AutoTokenizer, UMT5Config, UMT5EncoderModel

from deployments.lingbot.checkpoint import TEXT_FILE, TOKENIZER_FOLDER
from deployments.lingbot.vae import read_pth
from deployments.wan.checkpoint_files import CheckpointError

_NAMES = (
    (r"^token_embedding\.", "shared."),
    (r"^norm\.", "encoder.final_layer_norm."),
    (r"^blocks\.(\d+)\.attn\.(\w)\.", r"encoder.block.\1.layer.0.SelfAttention.\2."),
    (r"^blocks\.(\d+)\.pos_embedding\.embedding\.", r"encoder.block.\1.layer.0.SelfAttention.relative_attention_bias."),
    (r"^blocks\.(\d+)\.norm1\.", r"encoder.block.\1.layer.0.layer_norm."),
    (r"^blocks\.(\d+)\.norm2\.", r"encoder.block.\1.layer.1.layer_norm."),
    (r"^blocks\.(\d+)\.ffn\.gate\.0\.", r"encoder.block.\1.layer.1.DenseReluDense.wi_0."),
    (r"^blocks\.(\d+)\.ffn\.fc1\.", r"encoder.block.\1.layer.1.DenseReluDense.wi_1."),
    (r"^blocks\.(\d+)\.ffn\.fc2\.", r"encoder.block.\1.layer.1.DenseReluDense.wo."),
)
"""Native names and those of transformers' UMT5EncoderModel."""


def clean_prompt(prompt: str) -> str:
    """The form in which a prompt is encoded and named in keys: fixed Unicode, no HTML escapes, single spaces."""
    cleaned: str = prompt_clean(prompt)
    return cleaned


class WorldTextEncoder:
    """UMT5 and its tokenizer.  folder: of the release that holds them.  max_tokens: longer prompts are cut there."""

    def __init__(self, folder: Path, max_tokens: int, dtype: torch.dtype, device: torch.device) -> None:
        self._model = _load(folder / TEXT_FILE, dtype, device)
        self._tokenizer = AutoTokenizer.from_pretrained(folder / TOKENIZER_FOLDER)
        self._max_tokens, self._device = max_tokens, device

    @torch.inference_mode()
    def encode(self, prompt: str) -> Tensor:
        """Embeddings [n <= max_tokens, text_dim] of a cleaned prompt, on the CPU."""
        tokens = self._tokenizer(prompt, max_length=self._max_tokens, truncation=True, return_tensors="pt")
        ids, mask = tokens.input_ids.to(self._device), tokens.attention_mask.to(self._device)
        embeddings: Tensor = self._model(ids, mask).last_hidden_state[0]
        return embeddings.cpu()


def _load(path: Path, dtype: torch.dtype, device: torch.device) -> UMT5EncoderModel:
    """All sizes follow from the tensors' shapes."""
    state: dict[str, Tensor] = {}
    for name, tensor in read_pth(path).items():
        new = next((re.sub(old, to, name) for old, to in _NAMES if re.match(old, name)), name)
        state[new] = tensor
    attention = "encoder.block.0.layer.0.SelfAttention"
    try:
        buckets, heads = state[f"{attention}.relative_attention_bias.weight"].shape
        width = state[f"{attention}.q.weight"].shape[0]
        vocabulary, d_model = state["shared.weight"].shape
        config = UMT5Config(
            vocab_size=vocabulary,
            d_model=d_model,
            d_kv=width // heads,
            d_ff=state["encoder.block.0.layer.1.DenseReluDense.wi_0.weight"].shape[0],
            num_layers=len({name.split(".")[2] for name in state if name.startswith("encoder.block.")}),
            num_heads=heads,
            relative_attention_num_buckets=buckets,
        )
        with torch.device("meta"):
            model = UMT5EncoderModel(config)
        state["encoder.embed_tokens.weight"] = state["shared.weight"]
        model.load_state_dict({name: x.to(device, dtype) for name, x in state.items()}, assign=True)
    except (KeyError, RuntimeError, ValueError) as error:
        raise CheckpointError(f"{path.name}: not a UMT5 encoder in its native layout: {error}") from error
    return model.requires_grad_(False).eval()
