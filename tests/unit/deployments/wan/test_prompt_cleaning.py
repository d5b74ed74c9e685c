from __future__ import annotations

import pytest
from diffusers.pipelines.wan.pipeline_wan import prompt_clean as reference

from deployments.wan.prompt_cleaning import prompt_clean


@pytest.mark.parametrize(
    "text",
    [
        "a red ball",
        "  a \n\t red\u00a0 ball ",
        "caf\u00c3\u00a9",
        "&amp;lt;b&amp;gt; &quot;x&quot;",
        "",
        " ",
        "\u201cquoted\u201d",
    ],
)
def test_as_diffusers_cleans(text: str) -> None:
    assert prompt_clean(text) == reference(text)
