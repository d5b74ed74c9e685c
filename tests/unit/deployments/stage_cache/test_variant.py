"""Checks 3 and 4: what is refused before any weight is read, with what is supported."""

from __future__ import annotations

import pytest

from deployments.stage_cache.variant import UnsupportedVariant, refuse_unsupported

INDEX = {
    "_class_name": "WanPipeline",
    "transformer": ["diffusers", "WanTransformer3DModel"],
    "transformer_2": [None, None],
    "boundary_ratio": None,
    "expand_timesteps": False,
}
TRANSFORMER = {"in_channels": 16, "out_channels": 16, "image_dim": None, "added_kv_proj_dim": None}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_wan_text_to_video_is_supported(dtype: str) -> None:
    """float32 as well: a profile pins its dtype, and CPU ranks serve in float32."""
    refuse_unsupported(INDEX, TRANSFORMER, dtype)
    refuse_unsupported({k: INDEX[k] for k in ("_class_name", "transformer")}, TRANSFORMER, dtype)  # older files


@pytest.mark.parametrize(
    ("index", "transformer", "dtype", "reason"),
    [
        ({"transformer_2": ["diffusers", "WanTransformer3DModel"], "boundary_ratio": 0.875}, {}, "bfloat16", "0.875"),
        ({"boundary_ratio": 0.9}, {}, "bfloat16", "two experts"),
        ({"expand_timesteps": True}, {}, "bfloat16", "expand_timesteps"),
        ({"_class_name": "WanDMDPipeline"}, {}, "bfloat16", "distilled"),
        ({"_class_name": "WanImageToVideoPipeline"}, {}, "bfloat16", "WanImageToVideoPipeline"),
        ({"transformer": [None, None]}, {}, "bfloat16", "no transformer"),
        ({}, None, "bfloat16", "no transformer"),
        ({}, {"image_dim": 1280, "in_channels": 36}, "bfloat16", "image-to-video.*in_channels 36, out_channels 16"),
        ({}, {"quantization_config": {"quant_method": "gguf"}}, "bfloat16", "quantised"),
        ({}, {}, "float16", "dtype float16"),
    ],
)
def test_everything_else_is_refused(
    index: dict[str, object], transformer: dict[str, object] | None, dtype: str, reason: str
) -> None:
    merged = None if transformer is None else TRANSFORMER | transformer
    with pytest.raises(UnsupportedVariant, match=f"(?s){reason}.*single-expert Wan text-to-video") as refused:
        refuse_unsupported(INDEX | index, merged, dtype)
    assert isinstance(refused.value, ValueError)


def test_all_reasons_are_told_at_once() -> None:
    with pytest.raises(UnsupportedVariant, match=r"two experts.*expand_timesteps.*no transformer.*float16"):
        refuse_unsupported(INDEX | {"boundary_ratio": 0.9, "expand_timesteps": True}, None, "float16")
