"""Opening and loading checkpoints, against diffusers' own loader and with one fault at a time."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from diffusers import WanTransformer3DModel
from safetensors.torch import load_file, save_file

from deployments.wan.checkpoint import (
    CheckpointError,
    WanCheckpoint,
    fingerprint,
    load_expert,
    open_checkpoint,
    split_blocks,
)
from tests.allocations import peak_bytes
from tests.checkpoints import write_hollow_checkpoint, write_wan_checkpoint

CPU = torch.device("cpu")
BLOCKS = 4
SPLITS = [(4,), (1, 3), (2, 2), (3, 1), (1, 1, 2), (1, 2, 1), (2, 1, 1), (1, 1, 1, 1)]
"""All ways to cut four blocks into at most four stages."""

WEIGHTS = "transformer/diffusion_pytorch_model.safetensors"


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_wan_checkpoint(tmp_path_factory.mktemp("one"), num_blocks=BLOCKS)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two experts, fp16, every component in several files."""
    folder = tmp_path_factory.mktemp("two")
    return write_wan_checkpoint(folder, experts=2, num_blocks=BLOCKS, dtype=torch.float16, max_shard_size="60KB")


@pytest.fixture
def copy_of_one(one: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(one, tmp_path / "copy"))


@pytest.fixture
def copy_of_two(two: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(two, tmp_path / "copy"))


def load(checkpoint: WanCheckpoint, expert: str, blocks: range, dtype: torch.dtype) -> WanTransformer3DModel:
    first, last = blocks.start == 0, blocks.stop == checkpoint.num_blocks
    return load_expert(checkpoint, expert, blocks, first=first, last=last, dtype=dtype, device=CPU)


def whole_names(model: WanTransformer3DModel, blocks: range) -> dict[str, torch.Tensor]:
    """A stage's parameters and buffers under the names that they have in the whole model."""
    tensors = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        part, _, rest = name.partition(".")
        if part == "blocks":
            number, _, rest = rest.partition(".")
            name = f"blocks.{int(number) + blocks.start}.{rest}"
        tensors[name] = tensor
    return tensors


def test_one_expert_is_described(one: Path) -> None:
    checkpoint = open_checkpoint(str(one))
    assert checkpoint.folder == one
    assert checkpoint.experts == ("transformer",)
    assert checkpoint.boundary_ratio is None
    assert checkpoint.num_blocks == BLOCKS
    assert (checkpoint.scheduler, checkpoint.flow_shift) == ("UniPCMultistepScheduler", 3.0)
    assert checkpoint.scheduler_config["solver_order"] == 2
    assert checkpoint.transformer_config("transformer")["attention_head_dim"] == 24


def test_two_experts_are_described(two: Path) -> None:
    checkpoint = open_checkpoint(str(two))
    assert checkpoint.experts == ("transformer", "transformer_2")
    assert checkpoint.boundary_ratio == 0.875


def test_defaults_of_the_library_fill_what_a_config_leaves_out(copy_of_one: Path) -> None:
    # The published Wan2.1 VAE config has no scale factors.
    for key in ("scale_factor_temporal", "scale_factor_spatial", "patch_size", "is_residual"):
        edit(copy_of_one / "vae/config.json", lambda config, key=key: config.pop(key))
    vae = open_checkpoint(str(copy_of_one)).vae_config
    assert (vae["z_dim"], vae["scale_factor_temporal"], vae["scale_factor_spatial"]) == (16, 4, 8)
    assert len(vae["latents_mean"]) == len(vae["latents_std"]) == 16


def test_euler_shift_is_the_flow_shift(tmp_path: Path) -> None:
    folder = write_wan_checkpoint(tmp_path, num_blocks=1, scheduler="euler", flow_shift=5.5)
    checkpoint = open_checkpoint(str(folder))
    assert (checkpoint.scheduler, checkpoint.flow_shift) == ("FlowMatchEulerDiscreteScheduler", 5.5)


def test_opening_reads_no_tensor_data(tmp_path: Path) -> None:
    # 28 GB for each expert: reading any file's data would take longer than the bound and more than this machine has.
    folder = write_hollow_checkpoint(tmp_path, experts=2, num_blocks=40, heads=40, ffn_dim=13824)
    checkpoint: list[WanCheckpoint] = []
    # Less than the smallest matrix of a block (5120 x 5120 bf16, 52 MB): headers and meta tensors allocate nothing.
    assert peak_bytes(lambda: checkpoint.append(open_checkpoint(str(folder)))) < 1 << 20
    # 14.3 billion parameters in bf16, some in fp32: 26.7 GiB.
    full = checkpoint[0].stage_bytes("transformer", range(40), first=True, last=True, dtype=torch.bfloat16)
    assert 26.6 < full / 2**30 < 26.8


@pytest.mark.parametrize(
    ("files", "shards"), [(torch.float32, None), (torch.float16, "60KB"), (torch.bfloat16, None)], ids=str
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_stages_together_are_diffusers_model_bit_for_bit(
    tmp_path: Path, files: torch.dtype, dtype: torch.dtype, shards: str | None
) -> None:
    folder = write_wan_checkpoint(tmp_path, num_blocks=BLOCKS, dtype=files, max_shard_size=shards, experts=2)
    checkpoint = open_checkpoint(str(folder))
    for expert in checkpoint.experts:
        oracle = WanTransformer3DModel.from_pretrained(folder / expert, torch_dtype=dtype)
        expected = dict([*oracle.named_parameters(), *oracle.named_buffers()])
        assert {tensor.dtype for tensor in expected.values()} == {torch.float32, dtype}
        splits = [split_blocks(BLOCKS, len(split), split) for split in SPLITS]
        ranges = {blocks for split in splits for blocks in split}
        parts = {blocks: whole_names(load(checkpoint, expert, blocks, dtype), blocks) for blocks in ranges}
        for split in splits:
            union = {name: tensor for blocks in split for name, tensor in parts[blocks].items()}
            assert union.keys() == expected.keys()
            for name, tensor in union.items():
                assert tensor.dtype == expected[name].dtype, name
                assert torch.equal(tensor, expected[name]), name


def test_experts_are_not_mixed_up(two: Path) -> None:
    high, low = (
        load(open_checkpoint(str(two)), e, range(BLOCKS), torch.float32) for e in ("transformer", "transformer_2")
    )
    assert not torch.equal(high.proj_out.weight, low.proj_out.weight)
    assert torch.equal(low.proj_out.weight, from_files(two / "transformer_2")["proj_out.weight"].float())


def from_files(component: Path) -> dict[str, torch.Tensor]:
    return {k: v for file in component.glob("*.safetensors") for k, v in load_file(file).items()}


@pytest.mark.parametrize(("first", "last"), [(True, False), (False, False), (False, True), (True, True)])
def test_a_stage_holds_nothing_else(one: Path, first: bool, last: bool) -> None:
    checkpoint = open_checkpoint(str(one))
    model = load_expert(
        checkpoint, "transformer", range(1, 3), first=first, last=last, dtype=torch.bfloat16, device=CPU
    )
    assert len(model.blocks) == model.config.num_layers == 2
    assert hasattr(model, "patch_embedding") is first
    assert [hasattr(model, name) for name in ("norm_out", "proj_out", "scale_shift_table")] == [last] * 3
    tensors = [*model.parameters(), *model.buffers()]
    assert {tensor.device for tensor in tensors} == {CPU}
    assert not any(tensor.requires_grad for tensor in tensors)
    assert not any(module.training for module in model.modules())
    held = checkpoint.stage_bytes("transformer", range(1, 3), first=first, last=last, dtype=torch.bfloat16)
    assert sum(parameter.nbytes for parameter in model.parameters()) == held


def test_loading_takes_the_result_and_one_tensor(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(write_wan_checkpoint(tmp_path, num_blocks=8, heads=4, head_dim=48, ffn_dim=1024)))
    held = checkpoint.stage_bytes("transformer", range(8), first=True, last=True, dtype=torch.bfloat16)
    # The largest tensor of the file, time_proj or ffn, is 6 * 192 * 192 or 1024 * 192 fp32 values.
    largest = max(tensor.nbytes for tensor in checkpoint.tensors["transformer"].values())
    rope = 2 * 1024 * 48 * 4
    peak = peak_bytes(lambda: load(checkpoint, "transformer", range(8), torch.bfloat16))
    # The rope table is made in fp64 and doubled on the way: 8 of its sizes at most, however large the model.
    assert held < peak < held + largest + 8 * rope


def test_a_stage_reads_only_the_files_of_its_tensors(copy_of_two: Path) -> None:
    checkpoint = open_checkpoint(str(copy_of_two))
    needed = {
        tensor.file
        for name, tensor in checkpoint.tensors["transformer"].items()
        if name.startswith(("blocks.0", "condition_embedder", "patch_embedding"))
    }
    gone = {tensor.file for tensor in checkpoint.tensors["transformer"].values()} - needed
    assert gone, "the shards are too few for this test"
    for file in gone:
        (copy_of_two / file).unlink()
    load(checkpoint, "transformer", range(1), torch.float32)
    with pytest.raises(CheckpointError, match=r"transformer/diffusion_pytorch_model-.*: changed since"):
        load(checkpoint, "transformer", range(1, BLOCKS), torch.float32)


def test_loaded_weights_do_not_change_with_the_file(copy_of_one: Path) -> None:
    model = load(open_checkpoint(str(copy_of_one)), "transformer", range(BLOCKS), torch.float32)
    before = {name: tensor.clone() for name, tensor in model.named_parameters()}
    size = (copy_of_one / WEIGHTS).stat().st_size
    with (copy_of_one / WEIGHTS).open("r+b") as file:
        file.seek(size // 4)
        file.write(b"\xff" * (size // 2))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.named_parameters())


def test_a_file_cut_after_opening_is_named(copy_of_one: Path) -> None:
    checkpoint = open_checkpoint(str(copy_of_one))
    os.truncate(copy_of_one / WEIGHTS, 100_000)
    with pytest.raises(
        CheckpointError, match=rf"{WEIGHTS}: changed since the checkpoint was opened: ends \d+ bytes before"
    ):
        load(checkpoint, "transformer", range(BLOCKS), torch.float32)


@pytest.mark.parametrize("blocks", [range(0), range(2, 5), range(-1, 2), range(0, 4, 2), range(3, 1)])
def test_block_ranges_outside_the_model_are_refused(one: Path, blocks: range) -> None:
    with pytest.raises(ValueError, match=r"blocks: got range\(.*\), expected a range within 0 to 4"):
        load(open_checkpoint(str(one)), "transformer", blocks, torch.float32)


def test_unknown_expert_is_refused(one: Path) -> None:
    with pytest.raises(ValueError, match=r"expert: got 'transformer_2', expected one of \['transformer'\]"):
        load(open_checkpoint(str(one)), "transformer_2", range(1), torch.float32)


# Faults of a folder: what is done to it, and what the error must say.


def edit(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def set_in(file: str, **values: Any) -> Callable[[Path], None]:
    return lambda folder: edit(folder / file, lambda content: content.update(values))


def remove(file: str) -> Callable[[Path], None]:
    return lambda folder: (folder / file).unlink()


def write(file: str, content: bytes) -> Callable[[Path], None]:
    def fault(folder: Path) -> None:
        (folder / file).write_bytes(content)

    return fault


def weights(change: Callable[[dict[str, torch.Tensor]], Any], file: str = WEIGHTS) -> Callable[[Path], None]:
    def fault(folder: Path) -> None:
        tensors = load_file(folder / file)
        change(tensors)
        save_file(tensors, folder / file, metadata={"format": "pt"})

    return fault


def cut(file: str, size: int) -> Callable[[Path], None]:
    return lambda folder: os.truncate(folder / file, size)


KEY = "blocks.2.attn1.to_q.weight"
INDEX = "model_index.json"
VAE_WEIGHTS = "vae/diffusion_pytorch_model.safetensors"
FAULTS: dict[str, tuple[Callable[[Path], None], str]] = {
    "no index": (remove(INDEX), r"^model_index.json: missing in /"),
    "index is no JSON": (write(INDEX, b"{"), r"^model_index.json: cannot be read as JSON"),
    "index is a list": (write(INDEX, b"[]"), r"^model_index.json: got list, expected a JSON object"),
    "other pipeline": (
        set_in(INDEX, _class_name="WanImageToVideoPipeline"),
        r"^model_index.json: _class_name: got 'WanImageToVideoPipeline'; served are Wan2.1 and Wan2.2-A14B",
    ),
    "ti2v": (set_in(INDEX, expand_timesteps=True), r"^model_index.json: expand_timesteps: got true .*served are"),
    "vace": (
        set_in(INDEX, transformer=["diffusers", "WanVACETransformer3DModel"]),
        r"^model_index.json: transformer: got WanVACETransformer3DModel, expected WanTransformer3DModel",
    ),
    "no high-noise expert": (set_in(INDEX, transformer=[None, None]), r"^model_index.json: transformer: got None"),
    "scheduler": (
        set_in(INDEX, scheduler=["diffusers", "DDIMScheduler"]),
        r"^model_index.json: scheduler: got DDIMScheduler, expected FlowMatchEuler\w+ or UniPC",
    ),
    "scheduler differs": (
        set_in("scheduler/scheduler_config.json", _class_name="EulerDiscreteScheduler"),
        r"^scheduler/scheduler_config.json: _class_name: got 'Euler\w+', model_index.json says 'UniPC",
    ),
    "no scheduler": (remove("scheduler/scheduler_config.json"), r"^scheduler/scheduler_config.json: missing in /"),
    "no flow": (
        set_in("scheduler/scheduler_config.json", prediction_type="epsilon"),
        r"^scheduler/scheduler_config.json: prediction_type: got 'epsilon', Wan needs 'flow_prediction'",
    ),
    "dynamic shift": (set_in("scheduler/scheduler_config.json", use_dynamic_shifting=True), r"use_dynamic_shifting"),
    "boundary without expert": (
        set_in(INDEX, boundary_ratio=0.9),
        r"^model_index.json: boundary_ratio: got 0.9 without",
    ),
    "no config": (remove("transformer/config.json"), r"^transformer/config.json: missing in /"),
    "config of another class": (
        set_in("vae/config.json", _class_name="AutoencoderKL"),
        r"^vae/config.json: _class_name: got 'AutoencoderKL', expected AutoencoderKLWan",
    ),
    "impossible config": (
        set_in("transformer/config.json", num_layers="four"),
        r"^transformer/config.json: no model can be built from it",
    ),
    "image to video": (
        set_in("transformer/config.json", image_dim=1280, added_kv_proj_dim=5120),
        r"^transformer/config.json: image_dim: got 1280 \(image-to-video\), expected null; served are",
    ),
    "quantized": (set_in("transformer/config.json", quantization_config={}), r"quantization_config: quantized"),
    "text width": (
        set_in("transformer/config.json", text_dim=48),
        r"^transformer/diffusion\w+.safetensors: 'condition",
    ),
    "patch": (set_in("transformer/config.json", patch_size=[1, 1, 4]), r"'patch_embedding.weight' has shape"),
    "vae scale": (
        set_in("vae/config.json", scale_factor_spatial=16),
        r"^vae/config.json: scale_factor_spatial: got 16",
    ),
    "no weights": (remove(WEIGHTS), rf"^{WEIGHTS}: missing in /.*; neither is {WEIGHTS}.index.json there"),
    "cut data": (cut(WEIGHTS, 300_000), rf"^{WEIGHTS}: not a whole safetensors file: it has 300000 bytes, its header"),
    "cut header": (cut(WEIGHTS, 1000), rf"^{WEIGHTS}: not a whole safetensors file: .*fetch it again"),
    "empty file": (cut(WEIGHTS, 0), rf"^{WEIGHTS}: not a whole safetensors file"),
    "pointer file": (
        write(WEIGHTS, b"version https://git-lfs.github.com/spec/v1\n"),
        rf"^{WEIGHTS}: not a whole .*header",
    ),
    "missing key": (weights(lambda t: t.pop(KEY)), rf"^transformer: the weight files lack '{KEY}', which config.json"),
    "unexpected key": (
        weights(lambda t: t.update({"blocks.4.attn1.to_q.weight": torch.ones(1), "vace": torch.ones(1)})),
        rf"^{WEIGHTS}: holds 'blocks.4.attn1.to_q.weight', 'vace', which .* another variant\?",
    ),
    "shape": (
        weights(lambda t: t.update({KEY: torch.ones(48, 47)})),
        rf"^{WEIGHTS}: '{KEY}' has shape \[48, 47\], transformer/config.json calls for \[48, 48\]",
    ),
    "dtype": (
        weights(lambda t: t.update({KEY: t[KEY].double()})),
        rf"^{WEIGHTS}: '{KEY}' has dtype F64, expected one of \['BF16', 'F16', 'F32'\]",
    ),
    "vae key": (
        weights(lambda t: t.pop("decoder.conv_out.weight"), VAE_WEIGHTS),
        r"^vae: the weight files lack 'decoder.conv_out.weight'",
    ),
    "vae weights": (cut(VAE_WEIGHTS, 5000), rf"^{VAE_WEIGHTS}: not a whole"),
    "text encoder key": (
        weights(lambda t: t.pop("shared.weight"), "text_encoder/model.safetensors"),
        r"^text_encoder: the weight files lack 'shared.weight'",
    ),
    "weights twice": (
        write(f"{WEIGHTS}.index.json", b"{}"),
        rf"^{WEIGHTS}: stands beside {WEIGHTS}.index.json.*remove one",
    ),
    "no tokenizer": (remove("tokenizer/tokenizer.json"), r"^tokenizer/tokenizer.json: missing in /"),
    "no tokenizer config": (
        remove("tokenizer/tokenizer_config.json"),
        r"^tokenizer/tokenizer_config.json: missing in /",
    ),
}


@pytest.mark.parametrize(("fault", "message"), FAULTS.values(), ids=FAULTS.keys())
def test_a_fault_is_named(copy_of_one: Path, fault: Callable[[Path], None], message: str) -> None:
    open_checkpoint(str(copy_of_one))
    fault(copy_of_one)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(str(copy_of_one))


TWO_INDEX = f"{WEIGHTS.replace('transformer/', 'transformer_2/')}.index.json"


def renamed_in_map(folder: Path) -> None:
    edit(folder / TWO_INDEX, lambda index: index["weight_map"].update({KEY: "../../elsewhere.safetensors"}))


def moved_in_map(folder: Path) -> None:
    def change(index: dict[str, Any]) -> None:
        index["weight_map"][KEY] = index["weight_map"]["proj_out.weight"]

    edit(folder / TWO_INDEX, change)


TWO_FAULTS: dict[str, tuple[Callable[[Path], None], str]] = {
    "no boundary": (
        set_in(INDEX, boundary_ratio=None),
        r"^model_index.json: boundary_ratio: got None, expected a number",
    ),
    "boundary": (set_in(INDEX, boundary_ratio=1.5), r"^model_index.json: boundary_ratio: got 1.5"),
    "missing shard": (
        lambda folder: next(folder.glob("transformer_2/*-00002-of-*")).unlink(),
        rf"^transformer_2/\S+-00002-of-\d+.safetensors: missing in /.*, but {TWO_INDEX} names it",
    ),
    "unlisted": (
        lambda folder: edit(folder / TWO_INDEX, lambda index: index["weight_map"].pop(KEY)),
        rf"^{TWO_INDEX}: does not list '{KEY}' of transformer_2/diffusion_pytorch_model-\d",
    ),
    "not there": (
        lambda folder: edit(folder / TWO_INDEX, lambda index: index["weight_map"].update(x=index["weight_map"][KEY])),
        rf"^{TWO_INDEX}: says that transformer_2/\S+ holds 'x'; it does not",
    ),
    "in another shard": (moved_in_map, rf"^{TWO_INDEX}: says that transformer_2/\S+ holds '{KEY}'; it does not"),
    "outside": (renamed_in_map, rf"^{TWO_INDEX}: got the file name '../../elsewhere.safetensors'"),
    "no map": (set_in(TWO_INDEX, weight_map=[]), rf"^{TWO_INDEX}: weight_map: got \[\], expected an object"),
    "unlike": (
        set_in("transformer_2/config.json", eps=1e-5),
        r"^transformer_2/config.json: eps: got 1e-05, expected 1e-06 as in transformer/config.json",
    ),
}


@pytest.mark.parametrize(("fault", "message"), TWO_FAULTS.values(), ids=TWO_FAULTS.keys())
def test_a_fault_of_two_sharded_experts_is_named(
    copy_of_two: Path, fault: Callable[[Path], None], message: str
) -> None:
    open_checkpoint(str(copy_of_two))
    fault(copy_of_two)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(str(copy_of_two))


def test_tensors_that_diffusers_ignores_are_ignored(copy_of_one: Path) -> None:
    weights(lambda t: t.update({"blocks.1.attn2.norm_added_q.weight": torch.ones(48)}))(copy_of_one)
    checkpoint = open_checkpoint(str(copy_of_one))
    model = load(checkpoint, "transformer", range(1, 2), torch.float32)
    held = checkpoint.stage_bytes("transformer", range(1, 2), first=False, last=False, dtype=torch.float32)
    assert held == sum(parameter.nbytes for parameter in model.parameters())


def test_tied_text_embedding_may_have_either_name(copy_of_one: Path) -> None:
    rename = weights(
        lambda t: t.update({"encoder.embed_tokens.weight": t.pop("shared.weight")}), "text_encoder/model.safetensors"
    )
    rename(copy_of_one)
    open_checkpoint(str(copy_of_one))


# Where a checkpoint comes from.


def test_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"checkpoint: no folder at .*/nowhere/at/all"):
        open_checkpoint(str(tmp_path / "nowhere/at/all"))


@pytest.mark.parametrize("revision", [None, "main", "v1.0", "a" * 39, "A" * 40])
def test_a_hub_id_needs_a_commit(revision: str | None) -> None:
    with pytest.raises(CheckpointError, match=r"revision: got .* for 'owner/name', .* 40 hexadecimal digits"):
        open_checkpoint("owner/name", revision)


def test_a_folder_takes_no_revision(one: Path) -> None:
    with pytest.raises(CheckpointError, match=r"revision: got 'a+' with the local folder"):
        open_checkpoint(str(one), "a" * 40)


def test_cached_commit_opens_offline(one: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = tmp_path / "models--owner--name" / "snapshots" / ("c" * 40)
    shutil.copytree(one, snapshot)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert open_checkpoint("owner/name", "c" * 40).folder == snapshot
    with pytest.raises(CheckpointError, match=rf"checkpoint: 'owner/name' at {'d' * 40} could not be fetched"):
        open_checkpoint("owner/name", "d" * 40)


# Identity.


def test_fingerprint_is_that_of_the_files(one: Path) -> None:
    lines = ""
    for path in sorted(one.rglob("*"), key=lambda path: path.relative_to(one).as_posix()):
        if path.is_file():
            content = path.read_bytes()
            lines += f"{path.relative_to(one).as_posix()}\0{len(content)}\0{hashlib.sha256(content).hexdigest()}\n"
    assert fingerprint(open_checkpoint(str(one))) == hashlib.sha256(lines.encode()).hexdigest()


def test_fingerprint_changes_with_every_deciding_file_and_with_nothing_else(two: Path, copy_of_two: Path) -> None:
    original = fingerprint(open_checkpoint(str(two)))
    (copy_of_two / "README.md").write_text("words")
    (copy_of_two / "transformer" / "notes.safetensors").write_text("not named by the index")
    checkpoint = open_checkpoint(str(copy_of_two))
    assert fingerprint(checkpoint) == original
    for name in checkpoint.files:
        path = copy_of_two / name
        content, times = path.read_bytes(), path.stat()
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        # Times and size are as before: only reading the content can tell.
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
        assert fingerprint(checkpoint) != original, name
        path.write_bytes(content)
    assert fingerprint(checkpoint) == original


# Cutting.


@pytest.mark.parametrize(
    ("num_blocks", "pp", "split", "sizes"),
    [
        (30, 1, None, [30]),
        (30, 2, None, [15, 15]),
        (30, 4, None, [8, 8, 7, 7]),
        (40, 3, None, [14, 13, 13]),
        (4, 4, None, [1, 1, 1, 1]),
        (30, 2, (10, 20), [10, 20]),
    ],
)
def test_split(num_blocks: int, pp: int, split: tuple[int, ...] | None, sizes: list[int]) -> None:
    stages = split_blocks(num_blocks, pp, split)
    assert [len(stage) for stage in stages] == sizes
    assert [block for stage in stages for block in stage] == list(range(num_blocks))


@pytest.mark.parametrize(
    ("pp", "split", "message"),
    [
        (9, None, r"pp: got 9, expected 1 to 8"),
        (0, None, r"pp: got 0, expected 1 to 8"),
        (2, (4, 3), r"split: got \[4, 3\] \(sum 7\), expected 2 numbers above 0 with the sum 8"),
        (2, (8, 0), r"split: got \[8, 0\]"),
        (2, (9, -1), r"split: got \[9, -1\]"),
        (3, (4, 4), r"split: got \[4, 4\] \(sum 8\), expected 3 numbers"),
    ],
)
def test_impossible_splits_are_refused(pp: int, split: tuple[int, ...] | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        split_blocks(8, pp, split)
