from __future__ import annotations

import copy

import pytest
import torch
from diffusers import WanPipeline

from app.jobs.train_shapes.conditioning import WINDOW, embed, tokenise, use_window
from app.jobs.train_shapes.models import TEXT_LENGTH, new_text_encoder, new_tokenizer, new_transformer
from app.jobs.train_shapes.recipe import SMOKE

CAPTIONS = ["a red ball glides to the right on a navy background", ""]


def test_forty_places_equal_the_512_that_are_served():
    torch.manual_seed(0)
    recipe = SMOKE.denoiser
    tokenizer, text_encoder, transformer = new_tokenizer(), new_text_encoder(recipe), new_transformer(recipe).eval()
    served = WanPipeline._get_t5_prompt_embeds(
        _TextSide(tokenizer, text_encoder), CAPTIONS, max_sequence_length=TEXT_LENGTH, device=torch.device("cpu")
    )
    short = embed(text_encoder, tokenise(tokenizer, CAPTIONS))
    torch.testing.assert_close(short, served[:, :WINDOW], atol=1e-5, rtol=0)
    assert not served[:, WINDOW:].any()
    x, timestep = torch.randn(2, 16, 2, 4, 4), torch.tensor([999.0, 400.0])
    trained = copy.deepcopy(transformer)
    use_window(trained)
    with torch.no_grad():
        expected, found = transformer(x, timestep, served).sample, trained(x, timestep, short).sample
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)  # fp32, other order of sums


class _TextSide:
    """The two parts of a pipeline that its prompt embedding uses."""

    def __init__(self, tokenizer: object, text_encoder: object):
        self.tokenizer, self.text_encoder = tokenizer, text_encoder


def test_the_empty_prompt_is_the_end_token():
    assert tokenise(new_tokenizer(), [""])[0].tolist() == [1] + [0] * (WINDOW - 1)


def test_a_caption_too_long_is_refused():
    with pytest.raises(ValueError, match=f"captions: one has more than {WINDOW - 1} tokens"):
        tokenise(new_tokenizer(), ["red " * WINDOW])
