"""Reads the files of a checkpoint folder without their tensors: JSON, and the headers of safetensors files.

Every complaint is a `CheckpointError` that begins with the file, relative to the folder.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

BYTES = {"F16": 2, "BF16": 2, "F32": 4}
"""Bytes an element of the dtypes that weight files may have, by their safetensors names."""

STEMS = {
    "transformer": "diffusion_pytorch_model",
    "transformer_2": "diffusion_pytorch_model",
    "vae": "diffusion_pytorch_model",
    "text_encoder": "model",
}
"""First part of the weight files' names, by component; diffusers and transformers differ."""


class CheckpointError(ValueError):
    """A checkpoint cannot be served: what is wrong in which file, and the cure where there is one."""


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of a weight file, from the file's header."""

    file: str
    """Relative to the checkpoint folder, with forward slashes."""
    shape: tuple[int, ...]
    dtype: str
    """A key of `BYTES`."""

    @property
    def numel(self) -> int:
        """Elements."""
        return prod(self.shape)


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """The object in ``folder / name``."""
    try:
        content = json.loads((folder / name).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{name}: missing in {folder}") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{name}: cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{name}: got {type(content).__name__}, expected a JSON object")
    return content


def read_headers(folder: Path, component: str) -> dict[str, TensorInfo]:
    """Name to header entry of every tensor of one component, a key of `STEMS`.

    ``{stem}.safetensors`` holds all tensors, or ``{stem}.safetensors.index.json`` names the files that do.
    """
    single = f"{component}/{STEMS[component]}.safetensors"
    index = f"{single}.index.json"
    if (folder / single).exists() and (folder / index).exists():
        raise CheckpointError(f"{single}: stands beside {index}, so the weights are there twice; remove one of them")
    if not (folder / index).exists():
        return _read_header(folder, single, f"; neither is {index} there. Weights in other formats are not read")
    weight_map = read_json(folder, index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise CheckpointError(f"{index}: weight_map: got {weight_map!r:.80}, expected an object of tensor: file")
    return _read_shards(folder, component, index, weight_map)


def some(names: Iterable[str]) -> str:
    """The first three names in order and how many more there are."""
    ordered = sorted(names)
    more = f" and {len(ordered) - 3} more" if len(ordered) > 3 else ""
    return ", ".join(repr(name) for name in ordered[:3]) + more


def _read_shards(folder: Path, component: str, index: str, weight_map: dict[str, str]) -> dict[str, TensorInfo]:
    tensors: dict[str, TensorInfo] = {}
    for shard in sorted(set(weight_map.values())):
        if Path(shard).name != shard:
            raise CheckpointError(f"{index}: got the file name {shard!r}, expected one without folders")
        tensors |= _read_header(folder, f"{component}/{shard}", f", but {index} names it")
    if lost := [name for name, shard in weight_map.items() if _file(tensors, name) != f"{component}/{shard}"]:
        raise CheckpointError(f"{index}: says that {component}/{weight_map[min(lost)]} holds {some(lost)}; it does not")
    if extra := tensors.keys() - weight_map.keys():
        raise CheckpointError(f"{index}: does not list {some(extra)} of {tensors[min(extra)].file}")
    return tensors


def _file(tensors: dict[str, TensorInfo], name: str) -> str | None:
    return tensors[name].file if name in tensors else None


def _read_header(folder: Path, file: str, missing: str) -> dict[str, TensorInfo]:
    if not (folder / file).is_file():
        raise CheckpointError(f"{file}: missing in {folder}{missing}")
    try:
        # Opening checks that the header is whole and that the file is as long as the header says.
        with safe_open(folder / file, framework="pt") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 (not a mapping)
            tensors = {name: TensorInfo(file, tuple(s.get_shape()), s.get_dtype()) for name, s in slices.items()}
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{file}: not a whole safetensors file ({error}); fetch it again") from error
    for name, tensor in tensors.items():
        if tensor.dtype not in BYTES:
            raise CheckpointError(f"{file}: {name!r} has dtype {tensor.dtype}, expected one of {sorted(BYTES)}")
    return tensors
