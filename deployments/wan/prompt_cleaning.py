"""A prompt as the text encoder gets it: diffusers' `prompt_clean`, for processes that need neither it nor torch.

Source: huggingface/diffusers v0.42.1, src/diffusers/pipelines/wan/pipeline_wan.py, `basic_clean` and
`whitespace_clean`; a test compares both.
"""

from __future__ import annotations

import html
import re

import ftfy


def prompt_clean(text: str) -> str:
    """Mended characters, HTML entities resolved, runs of white space as one space."""
    mended = html.unescape(html.unescape(ftfy.fix_text(text)))
    return re.sub(r"\s+", " ", mended.strip()).strip()
