"""Checkpoints of a real model's transformer size with random weights, for speed alone: their videos are noise.

The transformer is of the real size.  The text encoder is one small layer of the real width, and the VAE a thin one of
the real latent channels unless the full one is asked for: what they take is shown in phases of their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanPipeline, WanTransformer3DModel
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast, UMT5Config, UMT5EncoderModel


@dataclass(frozen=True)
class TransformerSize:
    """What tells the Wan transformers apart."""

    blocks: int
    heads: int
    head_dim: int
    ffn_dim: int
    text_dim: int
    flow_shift: float
    """Of the published scheduler_config.json."""


SIZES = {
    # transformer/config.json of Wan-AI/Wan2.1-T2V-{1.3B,14B}-Diffusers
    "wan2.1-1.3b": TransformerSize(30, 12, 128, 8960, 4096, 3.0),
    "wan2.1-14b": TransformerSize(40, 40, 128, 13824, 4096, 3.0),
    # For trying the benchmark itself.
    "tiny": TransformerSize(4, 2, 24, 96, 32, 3.0),
}


def write_random_checkpoint(
    folder: Path, size: TransformerSize, *, full_vae: bool, dtype: torch.dtype, device: torch.device
) -> Path:
    """Write the checkpoint in the Diffusers layout and return its folder.

    dtype: of the weight files.  device: where the weights are drawn; a GPU draws billions in a second.
    The same arguments on the same kind of device give the same weights.
    """
    torch.manual_seed(0)
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            transformer = WanTransformer3DModel(
                num_layers=size.blocks,
                num_attention_heads=size.heads,
                attention_head_dim=size.head_dim,
                ffn_dim=size.ffn_dim,
                text_dim=size.text_dim,
            )
            vae = AutoencoderKLWan() if full_vae else AutoencoderKLWan(base_dim=8, num_res_blocks=1)
            text_encoder = UMT5EncoderModel(
                UMT5Config(vocab_size=len(_WORDS), d_model=size.text_dim, d_kv=64, d_ff=256, num_layers=1, num_heads=2)
            )
    finally:
        torch.set_default_dtype(default)
    WanPipeline(
        tokenizer=_tokenizer(),
        text_encoder=text_encoder,
        vae=vae,
        scheduler=UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=size.flow_shift
        ),
        transformer=transformer,
    ).save_pretrained(folder)
    return folder


_WORDS = ("<pad>", "</s>", "<unk>", "a", "red", "circle", "moving", "right")


def _tokenizer() -> PreTrainedTokenizerFast:
    """A word is a token; a sentence ends with </s>, as T5's do."""
    vocabulary = {word: index for index, word in enumerate(_WORDS)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.post_processor = TemplateProcessing(single="$A </s>", special_tokens=[("</s>", vocabulary["</s>"])])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", model_max_length=512
    )
