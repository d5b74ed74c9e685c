"""Untrained models of a recipe, with the class and tensor names of Wan 2.1."""

from __future__ import annotations

from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanTransformer3DModel
from tokenizers import Tokenizer, normalizers, pre_tokenizers, processors
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast, UMT5Config, UMT5EncoderModel

from app.jobs.train_shapes.grammar import vocabulary
from app.jobs.train_shapes.recipe import DenoiserRecipe, VaeRecipe

TEXT_LENGTH = 512  # token places that WanPipeline serves by default


def new_vae(recipe: VaeRecipe) -> AutoencoderKLWan:
    """z_dim 16, 4x in time, 8x in space; latents_mean and latents_std are fitted after training."""
    return AutoencoderKLWan(
        base_dim=recipe.base_dim,
        dim_mult=list(recipe.dim_mult),
        num_res_blocks=1,
        z_dim=16,
        latents_mean=[0.0] * 16,
        latents_std=[1.0] * 16,
    )


def new_transformer(recipe: DenoiserRecipe) -> WanTransformer3DModel:
    """Takes [N, 16, F, 16, 16] latents in patches of 1x2x2: 320 tokens for a clip of 17 frames."""
    return WanTransformer3DModel(
        num_attention_heads=recipe.heads,
        attention_head_dim=recipe.head_dim,
        num_layers=recipe.layers,
        ffn_dim=recipe.ffn_dim,
        text_dim=recipe.text_dim,
        freq_dim=128,
    )


def new_text_encoder(recipe: DenoiserRecipe) -> UMT5EncoderModel:
    """A small UMT5 encoder for the words of the grammar, without dropout."""
    config = UMT5Config(
        vocab_size=len(vocabulary()) + 3,
        d_model=recipe.text_dim,
        d_kv=32,
        num_heads=4,
        d_ff=2 * recipe.text_dim,
        num_layers=recipe.text_layers,
        num_decoder_layers=1,
        dropout_rate=0.0,
        feed_forward_proj="gated-gelu",
    )
    return UMT5EncoderModel(config)


def new_tokenizer() -> PreTrainedTokenizerFast:
    """Word level: pad 0, end 1, unknown 2, then the grammar's words in order. Every text ends with the end token."""
    words = {word: index for index, word in enumerate(["<pad>", "</s>", "<unk>", *vocabulary()])}
    fast = Tokenizer(WordLevel(words, unk_token="<unk>"))
    fast.normalizer = normalizers.Lowercase()
    fast.pre_tokenizer = pre_tokenizers.Whitespace()
    fast.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", 1)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=fast, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", model_max_length=TEXT_LENGTH
    )


def new_scheduler() -> UniPCMultistepScheduler:
    """Rectified flow with shift 3, as Wan 2.1 uses it for small frames."""
    return UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0)
