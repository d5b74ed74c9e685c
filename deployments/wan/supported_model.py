"""What kind of model a checkpoint folder must describe to be served, and which tensors its configs call for.

Served: Wan2.1 and Wan2.2-A14B text-to-video, one or two experts.  Everything is decided from JSON and tensor headers; a
model is built on the meta device to learn its tensors, which takes no memory for weights.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from diffusers import AutoencoderKLWan, WanTransformer3DModel
from torch import nn
from transformers import UMT5Config, UMT5EncoderModel

from deployments.wan.checkpoint_files import CheckpointError, TensorInfo, some
from deployments.wan.solver_spec import SHIFT_FIELD

SERVED = "served are Wan2.1 and Wan2.2-A14B text-to-video checkpoints (WanPipeline)"
CLASSES = {
    "transformer": {"WanTransformer3DModel"},
    "transformer_2": {"WanTransformer3DModel"},
    "vae": {"AutoencoderKLWan"},
    "text_encoder": {"UMT5EncoderModel"},
    "scheduler": set(SHIFT_FIELD),
}
"""Accepted classes of each component.  The tokenizer's class name depends on the transformers version that saved it."""


def experts_of(index: dict[str, Any]) -> tuple[str, ...]:
    """Transformers that the content of model_index.json names, first the one that handles high noise."""
    if index.get("_class_name") != "WanPipeline":
        raise CheckpointError(f"model_index.json: _class_name: got {index.get('_class_name')!r}; {SERVED}")
    if index.get("expand_timesteps"):
        raise CheckpointError(f"model_index.json: expand_timesteps: got true (Wan2.2-TI2V-5B); {SERVED}")
    two = _class_of(index, "transformer_2") is not None
    for component, accepted in CLASSES.items():
        name = _class_of(index, component)
        if name not in accepted and (component != "transformer_2" or two):
            raise CheckpointError(
                f"model_index.json: {component}: got {name}, expected {' or '.join(sorted(accepted))}"
            )
    boundary = index.get("boundary_ratio")
    if two and not (isinstance(boundary, float) and 0 < boundary < 1):
        raise CheckpointError(
            f"model_index.json: boundary_ratio: got {boundary!r}, expected a number between 0 and 1: it says when "
            "transformer_2 takes over"
        )
    if not two and boundary is not None:
        raise CheckpointError(f"model_index.json: boundary_ratio: got {boundary!r} without a transformer_2; {SERVED}")
    return ("transformer", "transformer_2") if two else ("transformer",)


def check_class(component: str, config: dict[str, Any]) -> None:
    """config.json of a component must be of the class that the component may have."""
    if config.get("_class_name") not in CLASSES[component]:
        raise CheckpointError(
            f"{component}/config.json: _class_name: got {config.get('_class_name')!r}, "
            f"expected {' or '.join(sorted(CLASSES[component]))}"
        )


def check_scheduler(name: str, config: dict[str, Any]) -> None:
    """name: the class model_index.json gives.  config: scheduler_config.json, which must describe a flow solver."""
    file = "scheduler/scheduler_config.json"
    if config.get("_class_name") != name:
        raise CheckpointError(f"{file}: _class_name: got {config.get('_class_name')!r}, model_index.json says {name!r}")
    if config.get("use_dynamic_shifting"):
        raise CheckpointError(f"{file}: use_dynamic_shifting: got true; served is a fixed flow shift (false)")
    if name == "UniPCMultistepScheduler":
        for field, wanted in (("prediction_type", "flow_prediction"), ("use_flow_sigmas", True)):
            if config.get(field) != wanted:
                raise CheckpointError(f"{file}: {field}: got {config.get(field)!r}, Wan needs {wanted!r}")


def meta_transformer(file: str, config: dict[str, Any]) -> WanTransformer3DModel:
    """The model of a transformer's config.json (its name is `file`), without memory for weights."""
    for field in ("image_dim", "added_kv_proj_dim"):
        if config.get(field) is not None:
            raise CheckpointError(f"{file}: {field}: got {config[field]!r} (image-to-video), expected null; {SERVED}")
    if config.get("quantization_config") is not None:
        raise CheckpointError(f"{file}: quantization_config: quantized weights are not served; remove the quantization")
    return _on_meta(file, WanTransformer3DModel.from_config, config)


def meta_vae(config: dict[str, Any]) -> AutoencoderKLWan:
    """The model of vae/config.json, without memory for weights."""
    return _on_meta("vae/config.json", AutoencoderKLWan.from_config, config)


def meta_text_encoder(config: dict[str, Any]) -> UMT5EncoderModel:
    """The model of text_encoder/config.json, without memory for weights."""
    return _on_meta("text_encoder/config.json", lambda values: UMT5EncoderModel(UMT5Config(**values)), config)


def check_alike(experts: dict[str, dict[str, Any]]) -> None:
    """experts: filled config by expert.  They take turns on the same latents and stages, so they are built alike."""
    wanted = experts["transformer"]
    for expert, config in experts.items():
        for key in wanted.keys() | config.keys():
            if config.get(key) != wanted.get(key):
                raise CheckpointError(
                    f"{expert}/config.json: {key}: got {config.get(key)!r}, expected {wanted.get(key)!r} as in "
                    "transformer/config.json"
                )


def check_fit(transformer: dict[str, Any], vae: dict[str, Any], text_encoder: dict[str, Any]) -> None:
    """The parts must fit each other and the request rules (sizes in multiples of 16 pixels, 4k + 1 frames)."""
    for field in ("in_channels", "out_channels"):
        if transformer[field] != vae["z_dim"]:
            raise CheckpointError(
                f"transformer/config.json: {field}: got {transformer[field]}, expected {vae['z_dim']} (z_dim of "
                f"vae/config.json); image-to-video models have more; {SERVED}"
            )
    if transformer["text_dim"] != text_encoder["d_model"]:
        raise CheckpointError(
            f"transformer/config.json: text_dim: got {transformer['text_dim']}, "
            f"expected {text_encoder['d_model']} (d_model of text_encoder/config.json)"
        )
    if tuple(transformer["patch_size"]) != (1, 2, 2):
        raise CheckpointError(
            f"transformer/config.json: patch_size: got {transformer['patch_size']}, expected [1, 2, 2]"
        )
    for field, wanted in (("scale_factor_temporal", 4), ("scale_factor_spatial", 8)):
        if vae[field] != wanted:
            raise CheckpointError(f"vae/config.json: {field}: got {vae[field]}, expected {wanted}; {SERVED}")


def check_tensors(component: str, found: dict[str, TensorInfo], model: nn.Module) -> None:
    """Compares headers with what `model` (on the meta device) loads: names both ways, and shapes."""
    names: dict[int, list[str]] = {}
    state = model.state_dict(keep_vars=True)
    for name, tensor in state.items():
        names.setdefault(id(tensor), []).append(name)  # tied tensors: files hold either name, or both
    if missing := [tied[0] for tied in names.values() if not any(name in found for name in tied)]:
        raise CheckpointError(f"{component}: the weight files lack {some(missing)}, which config.json calls for")
    # Set by diffusers (list or None) and transformers (set): tensors of a training script that no forward reads.
    ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    extra = [name for name in found.keys() - state.keys() if not any(re.search(i, name) for i in ignored)]
    if extra:
        raise CheckpointError(
            f"{found[min(extra)].file}: holds {some(extra)}, which the model of {component}/config.json does not have; "
            f"is it another variant? {SERVED}"
        )
    for name in sorted(found.keys() & state.keys()):
        if found[name].shape != tuple(state[name].shape):
            raise CheckpointError(
                f"{found[name].file}: {name!r} has shape {list(found[name].shape)}, "
                f"{component}/config.json calls for {list(state[name].shape)}"
            )


def _class_of(index: dict[str, Any], component: str) -> str | None:
    """Second of the pair [library, class] that stands for a component; absent and [null, null] are the same."""
    pair = index.get(component)
    return pair[1] if isinstance(pair, list) and len(pair) == 2 else None


def _on_meta(file: str, build: Any, config: dict[str, Any]) -> Any:
    try:
        with torch.device("meta"):
            return build(config)
    except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise CheckpointError(f"{file}: no model can be built from it: {error}") from error
