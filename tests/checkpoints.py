"""Writes small random Wan text-to-video checkpoints in the Diffusers layout, for the real loaders to read.

Weights are drawn so that no path is dead: norm weights differ from 1, biases from 0, and every block changes its input.
The same arguments give the same bytes, on any machine with the same library versions.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import torch
from diffusers import (
    AutoencoderKLWan,
    FlowMatchEulerDiscreteScheduler,
    UniPCMultistepScheduler,
    WanPipeline,
    WanTransformer3DModel,
)
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.normalizers import Lowercase
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from torch import nn
from transformers import PreTrainedTokenizerFast, UMT5Config, UMT5EncoderModel

# fmt: off
WORDS = [
    "a", "small", "large", "red", "green", "blue", "yellow", "circle", "square", "triangle", "moving", "slowly",
    "quickly", "left", "right", "up", "down", "still", "on", "black", "gray", "background", "and", "with", "the",
]
# fmt: on


def write_wan_checkpoint(
    folder: Path,
    *,
    experts: Literal[1, 2] = 1,
    num_blocks: int = 4,
    heads: int = 2,
    head_dim: int = 24,
    ffn_dim: int = 96,
    text_dim: int = 32,
    vae_base_dim: int = 8,
    dtype: torch.dtype = torch.float32,
    boundary_ratio: float = 0.875,
    scheduler: Literal["unipc", "euler"] = "unipc",
    flow_shift: float = 3.0,
    max_shard_size: str | None = None,
    seed: int = 0,
) -> Path:
    """Writes the checkpoint and returns its folder.

    experts: 2 adds `transformer_2` and sets `boundary_ratio`, as in Wan2.2-T2V-A14B; the two share no weight.
    head_dim: even; the rotary table splits it into 2 * (head_dim // 6) each for height and width, the rest for time.
    dtype: of all weight files.
    max_shard_size: such as "40KB": weight files above it are split, with an index beside them; None never splits.
    """
    width = heads * head_dim
    transformers = [
        WanTransformer3DModel(
            num_attention_heads=heads,
            attention_head_dim=head_dim,
            in_channels=16,
            out_channels=16,
            text_dim=text_dim,
            freq_dim=width,
            ffn_dim=ffn_dim,
            num_layers=num_blocks,
        )
        for _ in range(experts)
    ]
    vae = AutoencoderKLWan(base_dim=vae_base_dim, num_res_blocks=1)
    text_encoder = UMT5EncoderModel(
        UMT5Config(
            vocab_size=len(WORDS) + 3,
            d_model=text_dim,
            d_kv=16,
            d_ff=2 * text_dim,
            num_layers=2,
            num_heads=2,
            dropout_rate=0.0,
        )
    )
    for number, model in enumerate([*transformers, vae, text_encoder]):
        randomize(model, seed * 16 + number)
        for parameter in model.parameters():
            parameter.data = parameter.data.to(
                dtype
            )  # diffusers' own `to` keeps no parameter back, but warns that it should
    pipeline = WanPipeline(
        tokenizer=_tokenizer(),
        text_encoder=text_encoder,
        vae=vae,
        scheduler=_scheduler(scheduler, flow_shift),
        transformer=transformers[0],
        transformer_2=transformers[1] if experts == 2 else None,
        boundary_ratio=boundary_ratio if experts == 2 else None,
    )
    pipeline.save_pretrained(folder, max_shard_size=max_shard_size or "10GB")
    return folder


def write_hollow_checkpoint(folder: Path, *, num_blocks: int, heads: int, ffn_dim: int, experts: Literal[1, 2]) -> Path:
    """A bf16 checkpoint of a real model's size (head_dim 128, UMT5-XXL, the full VAE) that takes no disk space.

    The headers are real, the tensor data is a hole in the file.
    num_blocks, heads, ffn_dim: 30, 12, 8960 for Wan2.1-T2V-1.3B; 40, 40, 13824 for the 14B models.
    """
    write_wan_checkpoint(folder, experts=experts, num_blocks=1)
    transformer = {"num_layers": num_blocks, "num_attention_heads": heads, "attention_head_dim": 128}
    transformer |= {"ffn_dim": ffn_dim, "freq_dim": 256, "text_dim": 4096}
    umt5_xxl = {"vocab_size": 256384, "d_model": 4096, "d_kv": 64, "d_ff": 10240, "num_layers": 24, "num_heads": 64}
    changes = {"text_encoder": umt5_xxl, "vae": {"base_dim": 96, "num_res_blocks": 2}, "transformer": transformer}
    for path in folder.glob("*/config.json"):
        config = json.loads(path.read_text()) | changes[path.parent.name.removesuffix("_2")]
        path.write_text(json.dumps(config))
        with torch.device("meta"):
            model = {
                "text_encoder": lambda: UMT5EncoderModel(UMT5Config(**config)),  # noqa: B023 (called at once)
                "vae": lambda: AutoencoderKLWan.from_config(config),  # noqa: B023
                "transformer": lambda: WanTransformer3DModel.from_config(config),  # noqa: B023
            }[path.parent.name.removesuffix("_2")]()
        (weights,) = path.parent.glob("*.safetensors")
        _write_hollow(weights, dict(model.named_parameters()))
    return folder


def _write_hollow(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """The safetensors format: eight bytes of header length, the header in JSON, then the data; here a hole."""
    header, end = {}, 0
    for name, tensor in tensors.items():
        start, end = end, end + 2 * tensor.numel()
        header[name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


def randomize(model: nn.Module, seed: int) -> None:
    """Draws every parameter anew: norm weights around 1, biases around 0, matrices N(0, 1 / fan_in)."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            draw = torch.randn(parameter.shape, generator=generator)
            if name.endswith(("norm.weight", "gamma")) or (".norm" in name and name.endswith("weight")):
                parameter.copy_(1 + 0.1 * draw)
            elif parameter.ndim < 2:
                parameter.copy_(0.05 * draw)
            else:
                parameter.copy_(draw * parameter[0].numel() ** -0.5)


def _scheduler(
    kind: Literal["unipc", "euler"], flow_shift: float
) -> UniPCMultistepScheduler | FlowMatchEulerDiscreteScheduler:
    if kind == "euler":
        return FlowMatchEulerDiscreteScheduler(shift=flow_shift)
    return UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=flow_shift, num_train_timesteps=1000
    )


def _tokenizer() -> PreTrainedTokenizerFast:
    """A word is a token; a sentence ends with </s>, as T5's do."""
    vocabulary = {word: index for index, word in enumerate(["<pad>", "</s>", "<unk>", *WORDS])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.normalizer = Lowercase()
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.post_processor = TemplateProcessing(single="$A </s>", special_tokens=[("</s>", vocabulary["</s>"])])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
        model_max_length=512,
    )
