"""A Wan text-to-video checkpoint in the Diffusers layout: opened and checked by its headers, loaded stage by stage.

Opening reads JSON and safetensors headers alone, so a wrong folder fails before any weight or device memory is taken.
A stage reads only the tensors of its own block range.
"""

from __future__ import annotations

import hashlib
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch
from diffusers import WanTransformer3DModel

from deployments.wan import supported_model
from deployments.wan.checkpoint_files import CheckpointError, TensorInfo, read_headers, read_json, read_tensor
from deployments.wan.checkpoint_source import locate
from deployments.wan.solver_spec import SHIFT_FIELD

__all__ = ["CheckpointError", "WanCheckpoint", "fingerprint", "load_expert", "open_checkpoint", "split_blocks"]


@dataclass(frozen=True)
class WanCheckpoint:
    """A checkpoint whose configs and tensor headers have been checked.  Picklable; the dicts are for reading only."""

    folder: Path
    experts: tuple[str, ...]
    """("transformer",), or ("transformer", "transformer_2") for high and low noise."""
    boundary_ratio: float | None
    """transformer_2 takes over below this share of the training timesteps; None with one expert."""
    configs: dict[str, dict[str, Any]]
    """By expert, "vae" and "text_encoder": config.json with the library's defaults filled in."""
    scheduler: str
    """Class name, a key of `solver_spec.SHIFT_FIELD`."""
    scheduler_config: dict[str, Any]
    """scheduler_config.json as it is."""
    tensors: dict[str, dict[str, TensorInfo]]
    """By expert, "vae" and "text_encoder": every tensor of the weight files."""
    files: tuple[str, ...]
    """All files that decide what the model computes, sorted, relative to `folder`."""

    def transformer_config(self, expert: str) -> dict[str, Any]:
        """Arguments of `WanTransformer3DModel`, all of them."""
        return self.configs[expert]

    @property
    def vae_config(self) -> dict[str, Any]:
        """Arguments of `AutoencoderKLWan`: z_dim, scale_factor_temporal, scale_factor_spatial, latents_mean, ..."""
        return self.configs["vae"]

    @property
    def num_blocks(self) -> int:
        """Blocks of one expert; all experts have as many."""
        return int(self.configs[self.experts[0]]["num_layers"])

    @property
    def flow_shift(self) -> float:
        """The scheduler's own flow shift, for requests that give none."""
        # Both schedulers default to 1.0, which is no shift.
        return float(self.scheduler_config.get(SHIFT_FIELD[self.scheduler], 1.0))

    def stage_bytes(self, expert: str, blocks: range, *, first: bool, last: bool, dtype: torch.dtype) -> int:
        """Bytes of the weights that `load_expert` with the same arguments holds."""
        names = _stage_tensors(self.tensors[expert], blocks, first, last)
        return sum(self.tensors[expert][name].numel * loaded_dtype(name, dtype).itemsize for name in names)

    def component_bytes(self, component: str, dtype: torch.dtype) -> int:
        """Bytes of the weights of "vae" or "text_encoder" in one dtype."""
        return sum(tensor.numel for tensor in self.tensors[component].values()) * dtype.itemsize


def open_checkpoint(source: str, revision: str | None = None) -> WanCheckpoint:
    """Finds a checkpoint and checks it whole: classes, variant, every tensor's name and shape.

    source: a local folder, or a hub id, whose files are fetched at `revision` (HF_HUB_OFFLINE and the cache of
    huggingface_hub are respected).
    revision: 40 hexadecimal digits of a commit; with a hub id only.
    Raises `CheckpointError` naming the file, key or tensor that is missing or wrong.
    """
    folder = locate(source, revision)
    index = read_json(folder, "model_index.json")
    experts = supported_model.experts_of(index)
    scheduler = index["scheduler"][1]
    scheduler_config = read_json(folder, "scheduler/scheduler_config.json")
    supported_model.check_scheduler(scheduler, scheduler_config)
    configs, tensors = {}, {}
    for component in (*experts, "vae", "text_encoder"):
        configs[component], tensors[component] = _open_component(folder, component)
    supported_model.check_alike({expert: configs[expert] for expert in experts})
    supported_model.check_fit(configs["transformer"], configs["vae"], configs["text_encoder"])
    return WanCheckpoint(
        folder=folder,
        experts=experts,
        boundary_ratio=index.get("boundary_ratio"),
        configs=configs,
        scheduler=scheduler,
        scheduler_config=scheduler_config,
        tensors=tensors,
        files=_deciding_files(folder, tensors),
    )


def fingerprint(checkpoint: WanCheckpoint) -> str:
    """SHA-256 (hex) of the names, sizes and contents of `checkpoint.files`: equal exactly when all bytes are.

    Reads every file once, in parallel; nothing is remembered between calls, so it can never be stale.  The ranks read
    the same files next, then from the page cache.
    """

    def digest(name: str) -> str:
        with (checkpoint.folder / name).open("rb") as file:
            content = hashlib.file_digest(file, "sha256").hexdigest()
            return f"{name}\0{file.tell()}\0{content}\n"

    # hashlib releases the interpreter lock; the files of a real model outnumber 8, and few disks gain from more.
    with ThreadPoolExecutor(max_workers=8) as pool:
        return hashlib.sha256("".join(pool.map(digest, checkpoint.files)).encode()).hexdigest()


def split_blocks(num_blocks: int, pp: int, split: tuple[int, ...] | None) -> tuple[range, ...]:
    """Block range of each stage, first to last.

    split: blocks of each stage.  None: as even as can be; what is left over goes one each to the first stages, because
    the last one has the head to compute as well.  (30, 4, None): 8, 8, 7, 7.
    """
    if split is None:
        if not 1 <= pp <= num_blocks:
            raise ValueError(f"pp: got {pp}, expected 1 to {num_blocks}: each stage needs one of the model's blocks")
        split = tuple(num_blocks // pp + (stage < num_blocks % pp) for stage in range(pp))
    if len(split) != pp or min(split) < 1 or sum(split) != num_blocks:
        raise ValueError(
            f"split: got {list(split)} (sum {sum(split)}), expected {pp} numbers above 0 with the sum {num_blocks}, "
            "the model's blocks; leave it out to split evenly"
        )
    return tuple(range(start, end) for start, end in pairwise(accumulate(split, initial=0)))


def loaded_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """The dtype that the transformer's tensor `name` has in a model of `dtype`.

    The rule of diffusers 0.42 `models/model_loading_utils.py` `load_model_dict_into_meta`: whole parts of the dotted
    name, so that "norm1" keeps no "norm_q".
    """
    kept = set(WanTransformer3DModel._keep_in_fp32_modules)
    return dtype if kept.isdisjoint(name.split(".")) else torch.float32


@torch.no_grad()
def load_expert(
    checkpoint: WanCheckpoint,
    expert: str,
    blocks: range,
    *,
    first: bool,
    last: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> WanTransformer3DModel:
    """One stage's part of an expert, in eval mode and without gradients.

    The model's `blocks` are exactly those of the range; the condition embedder and the rotary table are always there,
    patch_embedding only with `first`, norm_out, proj_out and scale_shift_table only with `last`.  `config.num_layers`
    counts the blocks that are there.  Values and dtypes equal ``WanTransformer3DModel.from_pretrained(dtype=dtype)``.

    Reads one tensor at a time from the file to the device: host memory beyond the result is one tensor.
    Raises `CheckpointError` when a file no longer is what `open_checkpoint` saw.
    """
    if expert not in checkpoint.experts:
        raise ValueError(f"expert: got {expert!r}, expected one of {list(checkpoint.experts)}")
    if blocks.step != 1 or not 0 <= blocks.start < blocks.stop <= checkpoint.num_blocks:
        raise ValueError(f"blocks: got {blocks}, expected a range within 0 to {checkpoint.num_blocks}")
    config = checkpoint.transformer_config(expert)
    with torch.device("meta"):
        model = WanTransformer3DModel.from_config({**config, "num_layers": len(blocks)})
    # Buffers that no file holds: made where they are real, in the fp32 in which diffusers leaves them.
    model.rope = type(model.rope)(config["attention_head_dim"], config["patch_size"], config["rope_max_seq_len"])
    model.rope.to(device)
    if not first:
        del model.patch_embedding
    if not last:
        del model.norm_out, model.proj_out, model.scale_shift_table
    tensors = checkpoint.tensors[expert]
    state = {
        # Moved before it is converted: the device is faster at it, and the result is the same (round to nearest even).
        _local_name(name, blocks): read_tensor(checkpoint.folder, tensors[name])
        .to(device)
        .to(loaded_dtype(name, dtype))
        for name in _stage_tensors(tensors, blocks, first, last)
    }
    model.load_state_dict(state, assign=True)
    return model.requires_grad_(False).eval()


def _stage_tensors(tensors: dict[str, TensorInfo], blocks: range, first: bool, last: bool) -> list[str]:
    """Names, as in the files, of the tensors that a stage holds."""

    def held(name: str) -> bool:
        part, _, rest = name.partition(".")
        if any(re.search(pattern, name) for pattern in WanTransformer3DModel._keys_to_ignore_on_load_unexpected):
            return False
        if part == "blocks":
            return int(rest.partition(".")[0]) in blocks
        return first if part == "patch_embedding" else last if part in ("proj_out", "scale_shift_table") else True

    return [name for name in tensors if held(name)]


def _local_name(name: str, blocks: range) -> str:
    """blocks.7.x of the file is blocks.2.x of a stage that begins with block 5."""
    part, _, rest = name.partition(".")
    if part != "blocks":
        return name
    number, _, tail = rest.partition(".")
    return f"blocks.{int(number) - blocks.start}.{tail}"


def _open_component(folder: Path, component: str) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
    file = f"{component}/config.json"
    config = read_json(folder, file)
    tensors = read_headers(folder, component)
    if component == "text_encoder":
        model = supported_model.meta_text_encoder(config)
        filled = model.config.to_dict()
    else:
        supported_model.check_class(component, config)
        model = (
            supported_model.meta_vae(config) if component == "vae" else supported_model.meta_transformer(file, config)
        )
        filled = {key: value for key, value in model.config.items() if not key.startswith("_")}
    supported_model.check_tensors(component, tensors, model)
    return filled, tensors


def _deciding_files(folder: Path, tensors: dict[str, dict[str, TensorInfo]]) -> tuple[str, ...]:
    weights = {tensor.file for component in tensors.values() for tensor in component.values()}
    configs = {"model_index.json", "scheduler/scheduler_config.json", *(f"{part}/config.json" for part in tensors)}
    tokenizer = {
        f"tokenizer/{path.name}" for path in folder.glob("tokenizer/*") if path.suffix in (".json", ".model", ".txt")
    }
    if not tokenizer & {"tokenizer/tokenizer.json", "tokenizer/spiece.model"}:
        raise CheckpointError(f"tokenizer/tokenizer.json: missing in {folder}; neither is tokenizer/spiece.model there")
    if "tokenizer/tokenizer_config.json" not in tokenizer:
        raise CheckpointError(f"tokenizer/tokenizer_config.json: missing in {folder}")
    return tuple(sorted(weights | configs | tokenizer))
