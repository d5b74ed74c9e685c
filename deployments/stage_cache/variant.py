"""Which checkpoints the step cache can serve at all: judged from configuration files, before any weight is read."""

from __future__ import annotations

from collections.abc import Mapping

SUPPORTED = (
    "single-expert Wan text-to-video pipelines (`WanPipeline`), one timestep for all tokens, not distilled, "
    "unquantised, in bfloat16 or float32"
)
DTYPES = ("bfloat16", "float32")


class UnsupportedVariant(ValueError):
    """The step cache cannot serve this kind of model; it is served native."""


def refuse_unsupported(model_index: Mapping[str, object], transformer: Mapping[str, object] | None, dtype: str) -> None:
    """Raise UnsupportedVariant with every reason.

    model_index: model_index.json.  transformer: transformer/config.json, None when the pipeline has none.
    dtype: that the server runs the transformer in.
    """
    found = []
    pipeline = model_index.get("_class_name")
    if "DMD" in str(pipeline):
        found.append(f"distilled pipeline ({pipeline}): its few steps leave nothing to reuse")
    elif pipeline != "WanPipeline":
        found.append(f"pipeline {pipeline!r}")
    if _present(model_index.get("transformer_2")) or model_index.get("boundary_ratio") is not None:
        found.append(f"two experts (transformer_2, boundary_ratio {model_index.get('boundary_ratio')})")
    if model_index.get("expand_timesteps"):
        found.append("expand_timesteps: a timestep for each token")
    if transformer is None or not _present(model_index.get("transformer", ("diffusers", "WanTransformer3DModel"))):
        found.append("no transformer")
    else:
        if transformer.get("image_dim") is not None or transformer.get("added_kv_proj_dim") is not None:
            found.append("image-to-video transformer (image_dim)")
        if transformer.get("in_channels") != transformer.get("out_channels"):
            found.append(
                f"conditioned transformer (in_channels {transformer.get('in_channels')}, "
                f"out_channels {transformer.get('out_channels')})"
            )
        if transformer.get("quantization_config") is not None:
            found.append("quantised weights (quantization_config)")
    if dtype not in DTYPES:
        found.append(f"dtype {dtype}")
    if found:
        raise UnsupportedVariant(f"step cache: not for this model: {'; '.join(found)}. Supported are {SUPPORTED}")


def _present(component: object) -> bool:
    """model_index.json writes an absent component as null or [null, null]."""
    return component is not None and component != [None, None] and component != (None, None)
