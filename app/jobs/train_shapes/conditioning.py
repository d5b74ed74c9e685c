"""Text conditioning as it is served: 512 places, the words' embeddings first, zeros behind them, no mask in cross
attention.

The zeros take part in every softmax: all of them become one and the same key and value. So 40 places, the last of
which counts for all that were cut off, give exactly the attention of 512, at a fraction of the work: softmax over n
equal logits s is softmax over one logit s + log(n).

Axes: N clips, L = 40 places, D text width.
"""

from __future__ import annotations

import math

import torch
from diffusers import WanTransformer3DModel
from diffusers.models.transformers.transformer_wan import WanAttention
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

from app.jobs.train_shapes.models import TEXT_LENGTH

WINDOW = 40  # the longest caption has 35 words; the last place must be empty


def tokenise(tokenizer: PreTrainedTokenizerFast, captions: list[str]) -> Tensor:
    """Token ids [N, L] int64, padded with 0."""
    ids = tokenizer(captions, padding="max_length", max_length=WINDOW, truncation=True, return_tensors="pt").input_ids
    if ids[:, -1].any():
        raise ValueError(
            f"captions: one has more than {WINDOW - 1} tokens, allowed are {WINDOW - 1}; raise conditioning.WINDOW"
        )
    return ids


def embed(text_encoder: nn.Module, ids: Tensor) -> Tensor:
    """ids [N, L] -> [N, L, D], zero behind the end token, as WanPipeline._get_t5_prompt_embeds makes it."""
    mask = ids.ne(0)
    return text_encoder(ids, mask.long()).last_hidden_state * mask[..., None]


class WindowCrossAttention:
    """Attention processor for `attn2`: L places, the last standing for itself and the TEXT_LENGTH - L cut off."""

    def __call__(
        self,
        attn: WanAttention,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        attention_mask: None = None,
        rotary_emb: None = None,
    ) -> Tensor:
        query = (
            attn.norm_q(attn.to_q(hidden_states)).unflatten(2, (attn.heads, -1)).transpose(1, 2)
        )  # [N, heads, tokens, head_dim]
        key = attn.norm_k(attn.to_k(encoder_hidden_states)).unflatten(2, (attn.heads, -1)).transpose(1, 2)
        value = attn.to_v(encoder_hidden_states).unflatten(2, (attn.heads, -1)).transpose(1, 2)
        scores = (query @ key.transpose(2, 3)).float() * key.shape[-1] ** -0.5
        last = torch.arange(scores.shape[-1], device=scores.device) == scores.shape[-1] - 1
        scores = scores + last * math.log(TEXT_LENGTH - WINDOW + 1)
        out = (scores.softmax(-1).to(value.dtype) @ value).transpose(1, 2).flatten(2)
        return attn.to_out[0](out)


def use_window(transformer: WanTransformer3DModel) -> None:
    """From here on `transformer` takes text of L places instead of 512."""
    for block in transformer.blocks:
        block.attn2.set_processor(WindowCrossAttention())
