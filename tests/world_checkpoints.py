"""Writes small random world checkpoints in the layouts of the releases, for the real loaders to read.

The transformer is the smallest that has every part: 444,352 parameters in 161 tensors over two shards.  Weights are
drawn so that no path is dead; the same arguments give the same bytes.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import torch
from diffusers import AutoencoderKLWan
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.normalizers import Lowercase
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from torch import Tensor
from transformers import PreTrainedTokenizerFast, UMT5Config, UMT5EncoderModel

from deployments.lingbot.dit_config import DiTConfig, tensor_shapes
from deployments.lingbot.stream_config import Layout
from tests.checkpoints import WORDS, randomize

SMALL = DiTConfig(
    in_dim=36,
    out_dim=16,
    dim=64,
    ffn_dim=160,
    num_heads=4,
    num_layers=4,
    freq_dim=32,
    text_dim=48,
    text_len=16,
    control_dim=6,
)

FILES: dict[Layout, tuple[str, str, str]] = {
    "v1-fast": (
        "lingbot_world_fast",
        "diffusion_pytorch_model.safetensors.index.json",
        "model-{:05d}-of-{:05d}.safetensors",
    ),
    "v2-14b": ("transformers", "model.safetensors.index.json", "model-{:05d}-of-{:05d}.safetensors"),
    "v2-1.3b": (".", "model.safetensors.index.json", "model-{:05d}-of-{:05d}.safetensors"),
}
"""Folder of the transformer, name of its index, names of its shards."""

VAE_FILE = "Wan2.1_VAE.pth"
TEXT_FILE = "models_t5_umt5-xxl-enc-bf16.pth"


def write_world_checkpoint(
    folder: Path,
    *,
    layout: Layout = "v1-fast",
    config: DiTConfig = SMALL,
    vae_base_dim: int = 8,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Path:
    """Writes the release and returns its folder; v2-1.3b has no VAE and no text encoder, `write_support` writes them.

    dtype: of the transformer's weights.
    """
    place, index, shard = FILES[layout]
    (folder / place).mkdir(parents=True, exist_ok=True)
    tensors = {name: x.to(dtype) for name, x in world_tensors(config, seed).items()}
    names = sorted(tensors)
    shards = [names[: len(names) // 2], names[len(names) // 2 :]]
    weight_map = {}
    for number, part in enumerate(shards, start=1):
        file = shard.format(number, len(shards))
        save_file({name: tensors[name] for name in part}, folder / place / file)
        weight_map |= dict.fromkeys(part, file)
    total = sum(x.nbytes for x in tensors.values())
    (folder / place / index).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}))
    # As the releases: some sizes are not in config.json, and heads have to be where they are not dim / 128.
    written = {"model_type": "i2v", "dim": config.dim, "in_dim": config.in_dim, "num_layers": config.num_layers}
    written |= {"num_heads": config.num_heads, "text_len": config.text_len, "eps": config.eps}
    (folder / place / "config.json").write_text(json.dumps(written))
    if layout != "v2-1.3b":
        write_support(folder, text_dim=config.text_dim, vae_base_dim=vae_base_dim, seed=seed)
    return folder


def world_tensors(config: DiTConfig, seed: int) -> dict[str, Tensor]:
    """Random fp32 weights by native name: norm weights around 1, biases around 0, matrices N(0, 1 / fan_in)."""
    generator = torch.Generator().manual_seed(seed)
    out = {}
    for name, shape in tensor_shapes(config).items():
        draw = torch.randn(shape, generator=generator)
        if re.search(r"norm\w*\.weight$", name):
            out[name] = 1 + 0.1 * draw
        elif name.endswith("modulation"):
            out[name] = 0.5 * draw  # gates far enough from 0 that every sublayer counts
        elif len(shape) == 1:
            out[name] = 0.05 * draw
        else:
            out[name] = draw * draw[0].numel() ** -0.5
        if ".cam_s" in name:
            out[name] *= 0.2  # the camera scales and shifts every block: keep the stream within bounds
    return out


def write_support(folder: Path, *, text_dim: int = 48, vae_base_dim: int = 8, seed: int = 0) -> Path:
    """The VAE and the text encoder in their native files, and the tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    vae = AutoencoderKLWan(base_dim=vae_base_dim)
    randomize(vae, seed * 16 + 1)
    torch.save({native_vae_name(name): x for name, x in vae.state_dict().items()}, folder / VAE_FILE)
    text = UMT5EncoderModel(
        UMT5Config(vocab_size=len(WORDS) + 3, d_model=text_dim, d_kv=12, d_ff=2 * text_dim, num_layers=2, num_heads=4)
    )
    randomize(text, seed * 16 + 2)
    native = {native_text_name(name): x.bfloat16() for name, x in text.state_dict().items()}
    native.pop("")
    torch.save(native, folder / TEXT_FILE)
    (folder / "google/umt5-xxl").mkdir(parents=True, exist_ok=True)
    _tokenizer().save_pretrained(folder / "google/umt5-xxl")
    return folder


def native_vae_name(name: str) -> str:
    """The name in Wan2.1_VAE.pth of a tensor of AutoencoderKLWan with two residual blocks a level."""
    parts = {"norm1": "residual.0", "conv1": "residual.2", "norm2": "residual.3", "conv2": "residual.6"}
    parts |= {"conv_shortcut": "shortcut"}

    def inner(text: str) -> str:
        return re.sub(r"(norm1|conv1|norm2|conv2|conv_shortcut)(?=\.)", lambda m: parts[m[1]], text)

    if name.startswith(("quant_conv", "post_quant_conv")):
        return name.replace("post_quant_conv", "conv2").replace("quant_conv", "conv1")
    name = name.replace("conv_in", "conv1~").replace("norm_out", "head.0").replace("conv_out", "head.2")
    name = re.sub(r"mid_block\.resnets\.(\d)", lambda m: f"middle.{2 * int(m[1])}", name)
    name = name.replace("mid_block.attentions.0", "middle.1").replace("encoder.down_blocks", "encoder.downsamples")
    name = re.sub(
        r"decoder\.up_blocks\.(\d)\.resnets\.(\d)",
        lambda m: f"decoder.upsamples.{4 * int(m[1]) + int(m[2])}",
        name,
    )
    name = re.sub(r"decoder\.up_blocks\.(\d)\.upsamplers\.0", lambda m: f"decoder.upsamples.{4 * int(m[1]) + 3}", name)
    return inner(name).replace("conv1~", "conv1")


def native_text_name(name: str) -> str:
    """The name in the text encoder's .pth of a tensor of UMT5EncoderModel; empty for the tied second embedding."""
    if name == "encoder.embed_tokens.weight":
        return ""
    name = name.replace("shared.weight", "token_embedding.weight").replace("encoder.final_layer_norm", "norm")
    name = re.sub(
        r"encoder\.block\.(\d+)\.layer\.(\d)\.layer_norm", lambda m: f"blocks.{m[1]}.norm{int(m[2]) + 1}", name
    )
    name = re.sub(r"encoder\.block\.(\d+)\.layer\.0\.SelfAttention\.(\w)\.", r"blocks.\1.attn.\2.", name)
    name = re.sub(
        r"encoder\.block\.(\d+)\.layer\.0\.SelfAttention\.relative_attention_bias",
        r"blocks.\1.pos_embedding.embedding",
        name,
    )
    name = re.sub(r"encoder\.block\.(\d+)\.layer\.1\.DenseReluDense", r"blocks.\1.ffn", name)
    return name.replace("wi_0", "gate.0").replace("wi_1", "fc1").replace("wo.", "fc2.")


def _tokenizer() -> PreTrainedTokenizerFast:
    """A word is a token; a sentence ends with </s>."""
    vocabulary = {word: index for index, word in enumerate(["<pad>", "</s>", "<unk>", *WORDS])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.normalizer = Lowercase()
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.post_processor = TemplateProcessing(single="$A </s>", special_tokens=[("</s>", vocabulary["</s>"])])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", model_max_length=512
    )
