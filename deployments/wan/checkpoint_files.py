"""Reads the files of a checkpoint folder: JSON, headers of safetensors files, and single tensors.

Every complaint is a `CheckpointError` that begins with the file, relative to the folder.

Files are read, not mapped.  The safetensors library maps a whole file writable: the kernel refuses that for a file that
is larger than memory, weights on a CPU change with the file, and the process dies when the file shrinks.  The format
is simple: header length (8 bytes, little-endian), header (JSON), data; see
https://github.com/huggingface/safetensors, README.md, "Format".
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from io import FileIO
from math import prod
from pathlib import Path
from typing import Any

import torch

DTYPES = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}
"""The dtypes that weight files may have, by their safetensors names."""

MAX_HEADER_BYTES = 100_000_000
"""The format's own bound; a file that is no safetensors file claims more almost surely."""

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
    dtype: torch.dtype
    """One of `DTYPES`."""
    offset: int
    """First byte in the file."""

    @property
    def numel(self) -> int:
        """Elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return self.numel * self.dtype.itemsize


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
    return read_shards(folder, component, index, weight_map)


def read_shards(folder: Path, component: str, index: str, weight_map: dict[str, str]) -> dict[str, TensorInfo]:
    """Headers of the files of a component that an index names.  weight_map: file of each tensor.

    Raises `CheckpointError` where index and files disagree.
    """
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


def read_tensor(folder: Path, tensor: TensorInfo) -> torch.Tensor:
    """The tensor in new host memory, in the file's dtype."""
    content = torch.empty(tensor.shape, dtype=tensor.dtype)
    try:
        with (folder / tensor.file).open("rb", buffering=0) as file:
            file.seek(tensor.offset)
            _fill(content.view(-1).view(torch.uint8).numpy().data, file)
    except (OSError, EOFError) as error:
        raise CheckpointError(f"{tensor.file}: changed since the checkpoint was opened: {error}") from error
    return content


def some(names: Iterable[str]) -> str:
    """The first three names in order and how many more there are."""
    ordered = sorted(names)
    more = f" and {len(ordered) - 3} more" if len(ordered) > 3 else ""
    return ", ".join(repr(name) for name in ordered[:3]) + more


def _fill(buffer: memoryview, file: FileIO) -> None:
    while buffer:
        # One call reads at most 2 GiB on Linux.
        if not (count := file.readinto(buffer)):
            raise EOFError(f"ends {len(buffer)} bytes before the tensor does")
        buffer = buffer[count:]


def _file(tensors: dict[str, TensorInfo], name: str) -> str | None:
    return tensors[name].file if name in tensors else None


def _read_header(folder: Path, file: str, missing: str) -> dict[str, TensorInfo]:
    path = folder / file
    if not path.is_file():
        raise CheckpointError(f"{file}: missing in {folder}{missing}")
    try:
        with path.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            if length > MAX_HEADER_BYTES:
                raise ValueError(f"its header would have {length} bytes")
            header = json.loads(opened.read(length))
        header.pop("__metadata__", None)
        tensors = {name: _entry(file, name, entry, 8 + length) for name, entry in header.items()}
        end = max((tensor.offset + tensor.nbytes for tensor in tensors.values()), default=8 + length)
        if (size := path.stat().st_size) != end:
            raise ValueError(f"it has {size} bytes, its header describes {end}")
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{file}: not a whole safetensors file: {error}; fetch it again") from error
    return tensors


def _entry(file: str, name: str, entry: dict[str, Any], data: int) -> TensorInfo:
    """data: first byte after the header, from which the entry's offsets count."""
    if entry["dtype"] not in DTYPES:
        raise CheckpointError(f"{file}: {name!r} has dtype {entry['dtype']}, expected one of {sorted(DTYPES)}")
    start, end = entry["data_offsets"]
    tensor = TensorInfo(file, tuple(entry["shape"]), DTYPES[entry["dtype"]], data + start)
    if end - start != tensor.nbytes:
        raise ValueError(f"{name!r} has {end - start} bytes, its shape and dtype need {tensor.nbytes}")
    return tensor
