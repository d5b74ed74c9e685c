"""A released world checkpoint: found in its folder, checked by its headers, and loaded stage by stage.

    v1 Fast    lingbot_world_fast/ inside the base-cam folder, which also holds the VAE and the text encoder
    v2 14B     transformers/ beside the VAE and the text encoder
    v2 1.3B    the transformer alone in the folder; VAE and text encoder come from another release (`support`)

Index and shard names differ between and within releases, so the index is found by its ending and only its
`weight_map` says which file holds what.
"""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from deployments.lingbot.dit_config import DiTConfig, read_dit_config, tensor_shapes
from deployments.lingbot.stage import WorldStage, kept_in_fp32
from deployments.lingbot.stream_config import Layout
from deployments.wan.checkpoint_files import (
    CheckpointError,
    TensorInfo,
    read_json,
    read_shards,
    read_tensor,
    some,
)

FOLDERS: dict[Layout, str] = {"v1-fast": "lingbot_world_fast", "v2-14b": "transformers", "v2-1.3b": "."}
"""Where the transformer is, within the folder of a release."""

VAE_FILE = "Wan2.1_VAE.pth"
TEXT_FILE = "models_t5_umt5-xxl-enc-bf16.pth"
TOKENIZER_FOLDER = "google/umt5-xxl"
INDEX_END = ".safetensors.index.json"


@dataclass(frozen=True)
class WorldCheckpoint:
    """A checkpoint whose headers have been checked.  Picklable."""

    folder: Path
    layout: Layout
    support: Path
    """Folder of the VAE, the text encoder and its tokenizer."""
    config: DiTConfig
    tensors: dict[str, TensorInfo]
    """By native name, without the names of the files."""

    def stage_bytes(self, blocks: range, *, first: bool, last: bool, dtype: torch.dtype) -> int:
        """Bytes of the weights that `load_stage` with the same arguments holds."""
        names = _stage_tensors(self.config, blocks, first, last)
        return sum(
            self.tensors[name].numel * (torch.float32 if kept_in_fp32(name) else dtype).itemsize for name in names
        )


def open_world_checkpoint(folder: Path, support: Path | None = None) -> WorldCheckpoint:
    """Find and check a checkpoint; no weight is read.

    support: where VAE and text encoder are, for a release that has none.  None: `folder` itself.
    Raises CheckpointError naming the file or tensor that is missing, unknown or misshapen.
    """
    layout = _layout(folder)
    place = FOLDERS[layout]
    index = _index(folder, place)
    weight_map = read_json(folder, index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise CheckpointError(f"{index}: weight_map: got {weight_map!r:.80}, expected an object of tensor: file")
    tensors = read_shards(folder, place, index, weight_map)
    file = f"{place}/config.json"
    config = read_dit_config(file, read_json(folder, file), tensors)
    _check_tensors(index, tensors, config)
    where = folder if support is None else support
    for name in (VAE_FILE, TEXT_FILE, TOKENIZER_FOLDER):
        if not (where / name).exists():
            cure = "" if support else "; a release without it needs `support`, the folder of one that has it"
            raise CheckpointError(f"{name}: missing in {where}{cure}")
    return WorldCheckpoint(folder, layout, where, config, tensors)


def world_fingerprints(checkpoint: WorldCheckpoint) -> dict[str, str]:
    """SHA-256 (hex) of the bytes that decide what each part computes, by ``transformer``, ``vae``, ``text_encoder``.

    Reads every file once; nothing is remembered, so it can never be stale.
    """
    shards = sorted({tensor.file for tensor in checkpoint.tensors.values()})
    configs = [f"{FOLDERS[checkpoint.layout]}/config.json", _index(checkpoint.folder, FOLDERS[checkpoint.layout])]
    tokenizer = sorted(path for path in (checkpoint.support / TOKENIZER_FOLDER).iterdir() if path.is_file())
    return {
        "transformer": _digest([checkpoint.folder / name for name in [*configs, *shards]]),
        "vae": _digest([checkpoint.support / VAE_FILE]),
        "text_encoder": _digest([checkpoint.support / TEXT_FILE, *tokenizer]),
    }


@torch.no_grad()
def load_stage(
    checkpoint: WorldCheckpoint,
    blocks: range,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> WorldStage:
    """One stage, in eval mode and without gradients.  Reads the tensors of its own block range, one at a time.

    blocks: consecutive; the stage with block 0 also embeds latents, the one with the last block also has the head.
    dtype: of the weights, save those that `kept_in_fp32` names.
    Raises CheckpointError when a file no longer is what `open_world_checkpoint` saw.
    """
    config = checkpoint.config
    if blocks.step != 1 or not 0 <= blocks.start < blocks.stop <= config.num_layers:
        raise ValueError(f"blocks: got {blocks}, expected a range within 0 to {config.num_layers}")
    first, last = blocks.start == 0, blocks.stop == config.num_layers
    with torch.device("meta"):
        stage = WorldStage(config, len(blocks), dtype, first=first, last=last)
    state = {
        _local_name(name, blocks): read_tensor(checkpoint.folder, checkpoint.tensors[name])
        .to(device)
        .to(torch.float32 if kept_in_fp32(name) else dtype)
        for name in _stage_tensors(config, blocks, first, last)
    }
    stage.load_state_dict(state, assign=True)
    return stage.requires_grad_(False).eval()


def _layout(folder: Path) -> Layout:
    found: list[Layout] = [layout for layout, place in FOLDERS.items() if any((folder / place).glob(f"*{INDEX_END}"))]
    if len(found) != 1:
        places = ", ".join(f"{place}/ ({layout})" for layout, place in FOLDERS.items())
        got = ", ".join(FOLDERS[layout] for layout in found) or "none"
        raise CheckpointError(f"checkpoint: {folder}: an index *{INDEX_END} is expected in one of {places}; got {got}")
    return found[0]


def _index(folder: Path, place: str) -> str:
    names = sorted(path.name for path in (folder / place).glob(f"*{INDEX_END}"))
    if len(names) != 1:
        raise CheckpointError(f"{place}: got the indexes {names}, expected one *{INDEX_END}; remove the others")
    return f"{place}/{names[0]}"


def _check_tensors(index: str, found: dict[str, TensorInfo], config: DiTConfig) -> None:
    wanted = tensor_shapes(config)
    if missing := wanted.keys() - found.keys():
        raise CheckpointError(f"{index}: the weight files lack {some(missing)}, which a causal world transformer has")
    if extra := found.keys() - wanted.keys():
        raise CheckpointError(
            f"{found[min(extra)].file}: holds {some(extra)}, which a causal world transformer does not have; "
            "served are LingBot-World-Fast and the causal-fast models of LingBot-World v2"
        )
    for name in sorted(wanted):
        if found[name].shape != wanted[name]:
            raise CheckpointError(
                f"{found[name].file}: {name!r} has shape {list(found[name].shape)}, expected {list(wanted[name])}"
            )


def _stage_tensors(config: DiTConfig, blocks: range, first: bool, last: bool) -> list[str]:
    def held(name: str) -> bool:
        part, _, rest = name.partition(".")
        if part == "blocks":
            return int(rest.partition(".")[0]) in blocks
        return first if part == "patch_embedding" else last if part == "head" else True

    return [name for name in tensor_shapes(config) if held(name)]


def _local_name(name: str, blocks: range) -> str:
    """blocks.7.x of the file is blocks.2.x of a stage that begins with block 5."""
    part, _, rest = name.partition(".")
    if part != "blocks":
        return name
    number, _, tail = rest.partition(".")
    return f"blocks.{int(number) - blocks.start}.{tail}"


def _digest(paths: list[Path]) -> str:
    def line(path: Path) -> str:
        with path.open("rb") as file:
            return f"{path.name}\0{hashlib.file_digest(file, 'sha256').hexdigest()}\0{file.tell()}\n"

    with ThreadPoolExecutor(max_workers=8) as pool:
        return hashlib.sha256("".join(pool.map(line, paths)).encode()).hexdigest()
