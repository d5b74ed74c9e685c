"""Opening and loading the releases' layouts, and one fault at a time."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from safetensors.torch import load_file, save_file

from deployments.lingbot.checkpoint import FOLDERS, VAE_FILE, load_stage, open_world_checkpoint, world_fingerprints
from deployments.lingbot.dit_config import DiTConfig, tensor_shapes
from deployments.lingbot.random_checkpoint import SMALL, write_support
from deployments.lingbot.stage import kept_in_fp32
from deployments.lingbot.stream_config import Layout
from deployments.wan.checkpoint_files import CheckpointError
from tests.world_checkpoints import write_world_checkpoint

CPU = torch.device("cpu")
LAYOUTS: tuple[Layout, ...] = get_args(Layout)
PLACE, INDEX = "lingbot_world_fast", "lingbot_world_fast/diffusion_pytorch_model.safetensors.index.json"
SHARD = "lingbot_world_fast/model-00001-of-00002.safetensors"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[Layout, Path]:
    root = tmp_path_factory.mktemp("worlds")
    return {layout: write_world_checkpoint(root / layout, layout=layout) for layout in LAYOUTS}


@pytest.fixture
def copy(folders: dict[Layout, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(folders["v1-fast"], tmp_path / "copy"))


def shards(folder: Path) -> dict[str, torch.Tensor]:
    return {name: x for file in folder.glob("*.safetensors") for name, x in load_file(file).items()}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_loads_the_same_model(layout: Layout, folders: dict[Layout, Path]) -> None:
    support = folders["v1-fast"] if layout == "v2-1.3b" else None
    checkpoint = open_world_checkpoint(folders[layout], support)
    assert (checkpoint.layout, checkpoint.config) == (layout, SMALL)
    assert sum(tensor.numel for tensor in checkpoint.tensors.values()) == 444_352
    assert len(checkpoint.tensors) == 161
    stage = load_stage(checkpoint, range(4), dtype=torch.float32, device=CPU)
    loaded, written = stage.state_dict(), shards(folders[layout] / FOLDERS[layout])
    assert loaded.keys() == written.keys()
    assert all(torch.equal(loaded[name], written[name]) for name in written)


@pytest.mark.parametrize(
    ("blocks", "first", "last"), [((0, 2), True, False), ((1, 3), False, False), ((3, 4), False, True)]
)
def test_a_stage_holds_its_own_part(
    folders: dict[Layout, Path], blocks: tuple[int, int], first: bool, last: bool
) -> None:
    checkpoint = open_world_checkpoint(folders["v1-fast"])
    stage = load_stage(checkpoint, range(*blocks), dtype=torch.bfloat16, device=CPU)
    written = shards(folders["v1-fast"] / PLACE)
    names = set()
    for name, tensor in stage.state_dict().items():
        part, *rest = name.split(".")
        whole = ".".join([part, str(int(rest[0]) + blocks[0]), *rest[1:]]) if part == "blocks" else name
        names.add(whole)
        expected = written[whole] if kept_in_fp32(whole) else written[whole].bfloat16()
        assert tensor.dtype == expected.dtype, name
        assert torch.equal(tensor, expected), name
    parts = {name.split(".")[0] for name in names}
    assert ("patch_embedding" in parts, "head" in parts) == (first, last)
    assert {name.split(".")[1] for name in names if name.startswith("blocks.")} == {str(b) for b in range(*blocks)}
    assert len(names) == 16 + 2 * first + 3 * last + 35 * len(range(*blocks))
    held = checkpoint.stage_bytes(range(*blocks), first=first, last=last, dtype=torch.bfloat16)
    assert held == sum(x.nbytes for x in stage.state_dict().values())


def test_sizes_of_the_releases() -> None:
    """Tensor and parameter counts of the real models, from their dimensions alone."""
    fast = DiTConfig(36, 16, 5120, 13824, 40, 40, 256, 4096, 512, 6)
    small = DiTConfig(36, 16, 1536, 8960, 12, 30, 256, 4096, 512, 6)
    for config, tensors, parameters in ((fast, 1421, 18.544e9), (small, 1071, 1.710e9)):
        shapes = tensor_shapes(config)
        assert len(shapes) == tensors
        count = sum(torch.Size(shape).numel() for shape in shapes.values())
        assert count == pytest.approx(parameters, rel=5e-4)  # the counts are known to four digits
    assert {fast.head_dim, small.head_dim} == {128}


def test_a_release_without_vae_needs_another(folders: dict[Layout, Path], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"^Wan2.1_VAE.pth: missing in .*; a release without it needs `support`"):
        open_world_checkpoint(folders["v2-1.3b"])
    support = tmp_path / "support"
    write_support(support)
    assert open_world_checkpoint(folders["v2-1.3b"], support).support == support
    (support / VAE_FILE).unlink()
    with pytest.raises(CheckpointError, match=r"^Wan2.1_VAE.pth: missing in .*support$"):
        open_world_checkpoint(folders["v2-1.3b"], support)


def edit(name: str, change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        content = json.loads((folder / name).read_text())
        change(content)
        (folder / name).write_text(json.dumps(content))

    return apply


def weights(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    """Changes the first shard and lists in the index what it then holds."""

    def apply(folder: Path) -> None:
        tensors = load_file(folder / SHARD)
        change(tensors)
        save_file(tensors, folder / SHARD)
        name = Path(SHARD).name

        def relist(index: dict[str, Any]) -> None:
            others = {key: file for key, file in index["weight_map"].items() if file != name}
            index["weight_map"] = others | dict.fromkeys(tensors, name)

        edit(INDEX, relist)(folder)

    return apply


KEY = "blocks.1.cam_scale_layer.weight"
FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no index": (
        lambda f: (f / INDEX).unlink(),
        r"^checkpoint: .*an index \*.safetensors.index.json is expected in one",
    ),
    "two indexes": (
        lambda f: shutil.copy(f / INDEX, f / PLACE / "model.safetensors.index.json"),
        r"^lingbot_world_fast: got the indexes .*, expected one",
    ),
    "two layouts": (
        lambda f: shutil.copytree(f / PLACE, f / "transformers"),
        r"^checkpoint: .*; got lingbot_world_fast, transformers",
    ),
    "no map": (edit(INDEX, lambda c: c.update(weight_map=[])), rf"^{INDEX}: weight_map: got \[\]"),
    "no config": (lambda f: (f / PLACE / "config.json").unlink(), r"^lingbot_world_fast/config.json: missing"),
    "missing shard": (lambda f: (f / SHARD).unlink(), rf"^{SHARD}: missing in"),
    "missing tensor": (weights(lambda t: t.pop(KEY)), rf"^{INDEX}: the weight files lack '{KEY}'"),
    "missing deciding tensor": (
        weights(lambda t: t.pop("blocks.0.ffn.0.weight")),
        r"^lingbot_world_fast/config.json: the weight files beside it lack 'blocks.0.ffn.0.weight'",
    ),
    "unknown tensor": (weights(lambda t: t.update(img_emb=torch.ones(1))), rf"^{SHARD}: holds 'img_emb'"),
    "shape": (weights(lambda t: t.update({KEY: torch.ones(2, 2)})), rf"^{SHARD}: '{KEY}' has shape \[2, 2\]"),
    "heads": (
        edit(f"{PLACE}/config.json", lambda c: c.pop("num_heads")),
        r"^lingbot_world_fast/config.json: num_heads: got None, expected a number that cuts 64",
    ),
    "contradiction": (
        edit(f"{PLACE}/config.json", lambda c: c.update(num_layers=30)),
        r"^lingbot_world_fast/config.json: num_layers: got 30, but the tensors have 4",
    ),
    "no vae": (lambda f: (f / VAE_FILE).unlink(), r"^Wan2.1_VAE.pth: missing"),
}


@pytest.mark.parametrize(("fault", "message"), FAULTS.values(), ids=FAULTS.keys())
def test_a_fault_is_named(copy: Path, fault: Callable[[Path], object], message: str) -> None:
    open_world_checkpoint(copy)
    fault(copy)
    with pytest.raises(CheckpointError, match=message):
        open_world_checkpoint(copy)


def test_a_file_that_changed_is_refused(copy: Path) -> None:
    checkpoint = open_world_checkpoint(copy)
    (copy / SHARD).write_bytes((copy / SHARD).read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="changed since the checkpoint was opened"):
        load_stage(checkpoint, range(4), dtype=torch.float32, device=CPU)


def test_blocks_outside_the_model_are_refused(folders: dict[Layout, Path]) -> None:
    with pytest.raises(ValueError, match=r"blocks: got range\(3, 5\), expected a range within 0 to 4"):
        load_stage(open_world_checkpoint(folders["v1-fast"]), range(3, 5), dtype=torch.float32, device=CPU)


def test_fingerprints_tell_parts_apart(copy: Path) -> None:
    before = world_fingerprints(open_world_checkpoint(copy))
    (copy / "README.md").write_text("words")
    assert world_fingerprints(open_world_checkpoint(copy)) == before
    data = bytearray((copy / SHARD).read_bytes())
    data[-1] ^= 1
    (copy / SHARD).write_bytes(data)
    after = world_fingerprints(open_world_checkpoint(copy))
    assert {part for part in before if before[part] != after[part]} == {"transformer"}
