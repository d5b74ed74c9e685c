"""Every field that changes pixels changes the right keys, and none can be forgotten."""

from __future__ import annotations

from typing import Any

import pytest

from app.driver.job_state import VideoParams
from cache_actors.latent_key import IRRELEVANT, LatentIdentity, ServedModel, UnkeyedField, canonical_sha256

SERVED = ServedModel(
    weights="a" * 64,
    task="t2v",
    scheduler="UniPCMultistepScheduler",
    scheduler_config="b" * 64,
    boundary_ratio=None,
    loras=(),
    dtype="float32",
    quantization=None,
    latent_dtype="float32",
    step_profile=None,
    decoder="c",
    numerics="cpu",
)
PARAMS = VideoParams(
    model="wan-shapes",
    prompt="a red ball moves left",
    negative_prompt="",
    width=128,
    height=128,
    num_frames=17,
    fps=8,
    num_inference_steps=20,
    guidance_scale=5.0,
    guidance_scale_2=None,
    flow_shift=3.0,
    seed=1,
    max_sequence_length=64,
    outputs=(),
)
IDENTITY = LatentIdentity.of(
    PARAMS.model_dump(exclude={"tenant"}),
    SERVED,
    tenant="team",
    latent_shape=(1, 8, 5, 16, 16),
    timesteps=(999.0, 500.0),
    sigmas=(1.0, 0.5, 0.0),
    reused_steps=(),
    clean=str.strip,
)
CHANGES: dict[str, tuple[Any, str]] = {
    # field: another value, and the keys it must change: partition, trajectory, request
    "tenant": ("other", "ptr"),
    "weights": ("d" * 64, "ptr"),
    "task": ("i2v", "ptr"),
    "conditioning": ("e" * 64, "ptr"),
    "width": (256, "ptr"),
    "height": (256, "ptr"),
    "num_frames": (21, "ptr"),
    "latent_shape": ((1, 8, 5, 32, 16), "ptr"),
    "num_inference_steps": (30, "ptr"),
    "scheduler": ("FlowMatchEulerDiscreteScheduler", "ptr"),
    "scheduler_config": ("f" * 64, "ptr"),
    "flow_shift": (5.0, "ptr"),
    "timesteps": ((999.0, 501.0), "ptr"),
    "sigmas": ((1.0, 0.5001, 0.0), "ptr"),
    "guidance_scale": (6.0, "ptr"),
    "guidance_scale_2": (5.0, "ptr"),
    "boundary_ratio": (0.9, "ptr"),
    "negative_prompt": ("blurry", "ptr"),
    "max_sequence_length": (128, "ptr"),
    "loras": (({"weights": "a" * 64, "scale": 1.0, "expert": "transformer"},), "ptr"),
    "dtype": ("bfloat16", "ptr"),
    "quantization": ("fp8", "ptr"),
    "latent_dtype": ("bfloat16", "ptr"),
    "step_profile": ("profile", "ptr"),
    "reused_steps": ((3, 5), "ptr"),
    "prompt": ("a red ball moves right", "tr"),
    "seed": (2, "tr"),
    "numerics": ("H200", "t"),
    "decoder": ("bf16", "r"),
    "fps": (16, "r"),
    "outputs": (("sheet",), "r"),
}


def test_a_profile_that_reuses_nothing_is_no_part_of_a_key() -> None:
    served = SERVED.model_copy(update={"step_profile": "profile"})
    given = {"tenant": "team", "latent_shape": (1, 8, 5, 16, 16), "timesteps": (999.0,), "sigmas": (1.0, 0.0)}
    native = LatentIdentity.of(PARAMS.model_dump(exclude={"tenant"}), served, **given, reused_steps=(), clean=str.strip)
    plain = LatentIdentity.of(PARAMS.model_dump(exclude={"tenant"}), SERVED, **given, reused_steps=(), clean=str.strip)
    reusing = LatentIdentity.of(
        PARAMS.model_dump(exclude={"tenant"}), served, **given, reused_steps=(3,), clean=str.strip
    )
    assert native == plain
    assert reusing.step_profile == "profile"


def keys(identity: LatentIdentity) -> dict[str, str]:
    return {"p": identity.partition(), "t": identity.trajectory(), "r": identity.request()}


@pytest.mark.parametrize("field", list(CHANGES))
def test_each_field_alone_changes_exactly_its_keys(field: str) -> None:
    value, expected = CHANGES[field]
    changed = LatentIdentity.model_validate({**IDENTITY.model_dump(), field: value})
    old, new = keys(IDENTITY), keys(changed)
    assert "".join(k for k in "ptr" if old[k] != new[k]) == expected
    differing = [k for k, v in IDENTITY.partition_fields().items() if changed.partition_fields()[k] != v]
    assert differing == ([field] if "p" in expected else [])


def test_the_table_above_names_every_field() -> None:
    assert set(CHANGES) == set(LatentIdentity.model_fields)


@pytest.mark.parametrize("field", list(VideoParams.model_fields))
def test_every_request_field_is_keyed_or_known_as_irrelevant(field: str) -> None:
    assert (field in CHANGES) != (field in IRRELEVANT)


def test_a_new_request_field_stops_the_cache_until_it_is_placed() -> None:
    with pytest.raises(UnkeyedField, match="sharpness"):
        LatentIdentity.of(
            {**PARAMS.model_dump(exclude={"tenant"}), "sharpness": 1},
            SERVED,
            tenant="t",
            latent_shape=(1,),
            timesteps=(),
            sigmas=(),
            reused_steps=(),
            clean=str,
        )


def test_a_missing_field_is_an_error() -> None:
    for field in LatentIdentity.model_fields:
        fields = IDENTITY.model_dump()
        del fields[field]
        with pytest.raises(ValueError, match=field):
            LatentIdentity.model_validate(fields)


def test_the_model_name_is_no_part_and_prompts_are_cleaned() -> None:
    params = PARAMS.model_dump(exclude={"tenant"}) | {"model": "renamed", "prompt": "  a red ball moves left "}
    other = LatentIdentity.of(
        params,
        SERVED,
        tenant="team",
        latent_shape=(1, 8, 5, 16, 16),
        timesteps=(999.0, 500.0),
        sigmas=(1.0, 0.5, 0.0),
        reused_steps=(),
        clean=str.strip,
    )
    assert other == IDENTITY


def test_encoding_keeps_apart_what_runs_together() -> None:
    values: list[Any] = ["", None, 0, 0.0, False, (), (("a", "b"),), ("ab",), ("a", "b"), "ab", b"ab", {"a": "b"}, {}]
    assert len({canonical_sha256("x", {"f": value}) for value in values}) == len(values)
    assert canonical_sha256("x", {"a": "b", "c": ""}) != canonical_sha256("x", {"a": "", "c": "b"})
    assert canonical_sha256("x", {"f": 1}) != canonical_sha256("y", {"f": 1})
    assert canonical_sha256("x", {"f": -0.0}) == canonical_sha256("x", {"f": 0.0})
    with pytest.raises(ValueError, match="finite"):
        canonical_sha256("x", {"f": float("nan")})
    with pytest.raises(TypeError, match="set"):
        canonical_sha256("x", {"f": {1}})


def test_keys_stay_what_they_are() -> None:
    """Entries on disk outlive the program: a change here must raise KEY_SCHEMA."""
    assert canonical_sha256("partition", {"a": 1, "b": [None, 0.5, "x"]}) == canonical_sha256(
        "partition", {"b": (None, 0.5, "x"), "a": 1}
    )
    assert canonical_sha256("x", {"a": 1}) == "a984ba17a5d848582dc6114f6419e2db3b883c641ecb6b6b5aba4e567e975b5c"
