"""Names of tensors in the native files of a world release, for files that are written; the loaders know the inverse."""

from __future__ import annotations

import re


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
    """The name in the text encoder's .pth of a parameter of UMT5EncoderModel."""
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
