"""World checkpoints of random weights in the layouts of the releases, for the real loaders to read.

They show what the service computes and how fast, not what a trained world looks like.  Weights are drawn so that no
path is dead; the same arguments on the same kind of device give the same bytes.

    small    444,352 parameters in 161 tensors: the smallest transformer that has every part, and a VAE of base width 8
    1.3b     the transformer and the VAE of the 1.3B release; its text encoder is as wide as UMT5-XXL, but two layers
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from diffusers import AutoencoderKLWan
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordPiece
from tokenizers.normalizers import Lowercase
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast, UMT5Config, UMT5EncoderModel

from deployments.lingbot.checkpoint import FOLDERS, TEXT_FILE, TOKENIZER_FOLDER, VAE_FILE
from deployments.lingbot.dit_config import DiTConfig, tensor_shapes
from deployments.lingbot.native_names import native_text_name, native_vae_name
from deployments.lingbot.stream_config import Layout

CPU = torch.device("cpu")

# fmt: off
WORDS = [
    "a", "an", "the", "and", "with", "of", "in", "on", "at", "to", "by", "from", "small", "large", "old", "new",
    "red", "green", "blue", "yellow", "black", "white", "gray", "circle", "square", "triangle", "moving", "slowly",
    "quickly", "still", "left", "right", "up", "down", "background", "room", "hall", "house", "street", "city",
    "forest", "tree", "river", "sea", "mountain", "desert", "sky", "sun", "moon", "rain", "snow", "fog", "fire",
    "night", "day", "light", "dark", "water", "grass", "stone", "wood", "glass", "begins", "stops",
]
# fmt: on
"""Words that are one token; others are spelled, so that other prompts are other embeddings."""

_LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789.,;:!?'\"()-"

INDEX_FILES: dict[Layout, str] = {
    "v1-fast": "diffusion_pytorch_model.safetensors.index.json",
    "v2-14b": "model.safetensors.index.json",
    "v2-1.3b": "model.safetensors.index.json",
}
"""Name of the transformer's index in each release."""

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

LARGE = DiTConfig(
    in_dim=36,
    out_dim=16,
    dim=1536,
    ffn_dim=8960,
    num_heads=12,
    num_layers=30,
    freq_dim=256,
    text_dim=4096,
    text_len=512,
    control_dim=6,
)
"""LingBot-World v2 1.3B."""


@dataclass(frozen=True)
class RandomRelease:
    """What one folder gets."""

    layout: Layout
    config: DiTConfig
    vae_base_dim: int
    shards: int
    """Files of the transformer."""


RELEASES = {
    "small": RandomRelease("v1-fast", SMALL, vae_base_dim=8, shards=2),
    "1.3b": RandomRelease("v2-1.3b", LARGE, vae_base_dim=96, shards=6),
}


def write_random_release(
    folder: Path, release: RandomRelease, *, dtype: torch.dtype, seed: int = 0, device: torch.device = CPU
) -> None:
    """Write transformer, VAE, text encoder and tokenizer; `folder` appears when it is whole.

    dtype: of the transformer's files.  device: where weights are drawn; at the 1.3B size a GPU takes seconds, a CPU a
    minute.  Raises OSError when `folder` is there already.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}")
    write_transformer(unfinished, release.layout, release.config, release.shards, dtype=dtype, seed=seed, device=device)
    write_support(unfinished, release.config.text_dim, release.vae_base_dim, seed=seed, device=device)
    unfinished.rename(folder)


def write_transformer(
    folder: Path,
    layout: Layout,
    config: DiTConfig,
    shards: int = 2,
    *,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    device: torch.device = CPU,
) -> None:
    """The transformer alone: shards, index and config.json in the folder where the layout has them."""
    place = folder / FOLDERS[layout]
    place.mkdir(parents=True, exist_ok=True)
    shapes, weight_map, total = tensor_shapes(config), dict[str, str](), 0
    names = sorted(shapes)
    of_shard = -(-len(names) // shards)
    for number in range(shards):
        part = {name: shapes[name] for name in names[number * of_shard : (number + 1) * of_shard]}
        tensors = {name: x.cpu() for name, x in random_tensors(part, seed + 1000 * number, dtype, device).items()}
        file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        save_file(tensors, place / file)
        weight_map |= dict.fromkeys(part, file)
        total += sum(x.nbytes for x in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (place / INDEX_FILES[layout]).write_text(json.dumps(index))
    # As in the releases: other sizes follow from the tensors, and heads have to be here where they are not dim / 128.
    written = {"model_type": "i2v", "dim": config.dim, "in_dim": config.in_dim, "num_layers": config.num_layers}
    written |= {"num_heads": config.num_heads, "text_len": config.text_len, "eps": config.eps}
    (place / "config.json").write_text(json.dumps(written))


def write_support(
    folder: Path, text_dim: int = 48, vae_base_dim: int = 8, *, seed: int = 0, device: torch.device = CPU
) -> None:
    """The VAE (fp32) and the text encoder (bf16) in their native files, and the tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    with torch.device("meta"):
        vae = AutoencoderKLWan(base_dim=vae_base_dim)
    weights = random_tensors(parameter_shapes(vae), seed + 1, torch.float32, device)
    torch.save({native_vae_name(name): x.cpu() for name, x in weights.items()}, folder / VAE_FILE)
    with torch.device("meta"):
        text = UMT5EncoderModel(text_config(text_dim))
    weights = random_tensors(parameter_shapes(text), seed + 2, torch.bfloat16, device)
    torch.save({native_text_name(name): x.cpu() for name, x in weights.items()}, folder / TEXT_FILE)
    (folder / TOKENIZER_FOLDER).mkdir(parents=True, exist_ok=True)
    _tokenizer().save_pretrained(folder / TOKENIZER_FOLDER)


def text_config(text_dim: int) -> UMT5Config:
    """Of the text encoder that `write_support` writes."""
    narrow = min(2 * text_dim, 256)
    return UMT5Config(vocab_size=len(_vocabulary()), d_model=text_dim, d_kv=12, d_ff=narrow, num_layers=2, num_heads=4)


def parameter_shapes(model: nn.Module) -> dict[str, Sequence[int]]:
    """Name and shape of every parameter, shared ones once."""
    return {name: parameter.shape for name, parameter in model.named_parameters()}


def random_tensors(
    shapes: Mapping[str, Sequence[int]], seed: int, dtype: torch.dtype, device: torch.device
) -> dict[str, Tensor]:
    """Weights by name: norm weights around 1, biases around 0, matrices N(0, 1 / fan_in)."""
    generator = torch.Generator(device).manual_seed(seed)
    out = {}
    for name in sorted(shapes):
        draw = torch.randn(tuple(shapes[name]), generator=generator, device=device, dtype=dtype)
        if re.search(r"(norm\w*\.weight|gamma)$", name):
            draw = 1 + 0.1 * draw
        elif name.endswith("modulation"):
            draw *= 0.5  # gates far enough from 0 that every sublayer counts
        elif draw.ndim == 1:
            draw *= 0.05
        else:
            draw *= draw[0].numel() ** -0.5
        if ".cam_s" in name:
            draw *= 0.2  # the camera scales and shifts every block: keep the stream within bounds
        out[name] = draw
    return out


def _vocabulary() -> dict[str, int]:
    spelled = [*_LETTERS, *(f"##{letter}" for letter in _LETTERS)]
    tokens: Iterable[str] = dict.fromkeys(["<pad>", "</s>", "<unk>", *WORDS, *spelled])
    return {token: index for index, token in enumerate(tokens)}


def _tokenizer() -> PreTrainedTokenizerFast:
    """A known word is a token, others are cut into known beginnings and letters; a sentence ends with </s>."""
    vocabulary = _vocabulary()
    tokenizer = Tokenizer(WordPiece(vocabulary, unk_token="<unk>"))
    tokenizer.normalizer = Lowercase()
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.post_processor = TemplateProcessing(single="$A </s>", special_tokens=[("</s>", vocabulary["</s>"])])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", model_max_length=512
    )
