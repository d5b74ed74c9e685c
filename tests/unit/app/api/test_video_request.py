from __future__ import annotations

import contextlib
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.api.errors import ApiError, InvalidValue, UnknownField, UnknownModel
from app.api.video_request import DRAWN_SEEDS, FORM, VideoRequest, parse_request, resolve, seconds_text
from app.driver.job_state import VideoParams
from tests.fake_jobs import card


def params(experts: int = 1, **fields: Any) -> VideoParams:
    return resolve(parse_request({"prompt": "a", **fields}), [card(experts=experts)])


def test_defaults_are_the_model_s():
    assert params(seed=3) == VideoParams(
        model="wan",
        prompt="a",
        negative_prompt="",
        width=64,
        height=48,
        num_frames=17,
        fps=16,
        num_inference_steps=4,
        guidance_scale=5.0,
        guidance_scale_2=None,
        flow_shift=3.0,
        seed=3,
        max_sequence_length=512,
        outputs=(),
    )


def test_every_field_arrives():
    sent: dict[str, Any] = {
        "negative_prompt": "b",
        "num_frames": 5,
        "fps": 8,
        "num_inference_steps": 2,
        "guidance_scale": 1.5,
        "guidance_scale_2": 2.5,
        "flow_shift": 7.0,
        "seed": 2**63 - 1,
        "max_sequence_length": 10,
        "step_cache": "off",
        "outputs": ["frames"],
        "latent_cache": "approximate",
        "seed_policy": "donor",
    }
    got = params(experts=2, model="wan", size="32x96", **sent).model_dump()
    derived = {"seed_given": True, "tenant": "default", "outputs": ("frames",)}
    assert got == {**sent, "model": "wan", "prompt": "a", "width": 32, "height": 96, **derived}
    assert params().seed_given is False


def test_null_is_absent():
    nulls = dict.fromkeys(name for name in VideoRequest.model_fields if name not in ("prompt", "seed"))
    assert params(**nulls, seed=1) == params(seed=1)


def test_a_missing_seed_is_drawn_anew_and_fits_a_double():
    seeds = {params().seed for _ in range(20)}
    assert len(seeds) == 20  # 20 draws out of 2^53 collide once in 10^13 runs
    assert max(seeds) < DRAWN_SEEDS


@pytest.mark.parametrize(
    ("seconds", "frames"), [("1", 17), (1, 17), (1.0, 17), ("0.25", 5), (0.5, 9), ("0", 1), ("2.500", 41)]
)
def test_seconds_are_frames_minus_one_over_fps(seconds: object, frames: int):
    got = params(seconds=seconds)
    assert got.num_frames == frames
    assert Fraction(seconds_text(got.num_frames, got.fps)) == Fraction(str(seconds))


def test_seconds_use_the_fps_of_the_request():
    assert params(seconds="2", fps=12).num_frames == 25


def test_seconds_and_frames_may_agree_but_not_differ():
    assert params(seconds="1", num_frames=17).num_frames == 17
    with pytest.raises(InvalidValue, match="got 1, which at 16 fps is 17 frames, but num_frames is 21") as caught:
        params(seconds="1", num_frames=21)
    assert caught.value.param == "seconds"


@settings(deadline=None)
@given(st.integers(-10, 200))
def test_a_wrong_frame_count_names_the_nearest_valid_ones(frames: int):
    valid = list(range(1, 42, 4))  # the card allows 41
    if frames in valid:
        assert params(num_frames=frames).num_frames == frames
        return
    with pytest.raises(InvalidValue) as caught:
        params(num_frames=frames)
    distance = min(abs(frames - n) for n in valid)
    nearest = [n for n in valid if abs(frames - n) == distance]
    named = caught.value.message.split("nearest valid")[1]
    assert all(str(n) in named for n in nearest)


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"prompt": ""}, "prompt", "visible character"),
        ({"prompt": " \n"}, "prompt", "visible character"),
        ({"prompt": "a\x00"}, "prompt", "NUL"),
        ({"prompt": "\ud800"}, "prompt", "surrogates"),
        ({"prompt": "x" * 201}, "prompt", "got 201 characters, at most 200"),
        ({"prompt": None}, "prompt", "got null"),
        ({"prompt": 5}, "prompt", "got 5, expected a valid string"),
        ({"negative_prompt": "x" * 201}, "negative_prompt", "at most 200"),
        ({"negative_prompt": "\x00"}, "negative_prompt", "NUL"),
        ({"size": "100x64"}, "size", 'got "100x64", .* multiples of 16; nearest valid: 96x64 and 112x64'),
        ({"size": "8x16"}, "size", "nearest valid: 16x16 and 16x16"),
        ({"size": "64X48"}, "size", 'expected a string "WIDTHxHEIGHT"'),
        ({"size": "064x48"}, "size", "WIDTHxHEIGHT"),
        ({"size": "0x16"}, "size", "WIDTHxHEIGHT"),
        ({"size": "٦٤x48"}, "size", "WIDTHxHEIGHT"),
        ({"size": [64, 48]}, "size", "WIDTHxHEIGHT"),
        ({"size": "192x96"}, "size", "18432 pixels, at most 9216 allowed; nearest valid of this shape: 128x64"),
        ({"size": "99984x16"}, "size", "nearest valid of this shape: 576x16"),
        ({"size": "16x99984"}, "size", "nearest valid of this shape: 16x576"),
        ({"num_frames": 0}, "num_frames", "nearest valid: 1"),
        ({"num_frames": "17"}, "num_frames", 'got "17", expected a valid integer'),
        ({"num_frames": 17.0}, "num_frames", "got 17.0, expected a valid integer"),
        ({"num_frames": True}, "num_frames", "got true, expected a valid integer"),
        ({"seconds": "0.3"}, "seconds", "is 5.8 frames; .* num_frames: 5 and 9, nearest valid seconds: 0.25 and 0.5"),
        ({"seconds": "9"}, "seconds", "at most 41; nearest valid num_frames: 41, nearest valid seconds: 2.5"),
        ({"seconds": "-1"}, "seconds", "expected a number of seconds"),
        ({"seconds": "1e1"}, "seconds", "expected a number of seconds"),
        ({"seconds": 1e300}, "seconds", "expected a number of seconds"),
        ({"seconds": float("nan")}, "seconds", "got NaN"),
        ({"seconds": True}, "seconds", "got true"),
        ({"fps": 0}, "fps", "nearest valid: 1"),
        ({"fps": 121}, "fps", "nearest valid: 120"),
        ({"num_inference_steps": 21}, "num_inference_steps", "at most 20 allowed; nearest valid: 20"),
        ({"guidance_scale": float("inf")}, "guidance_scale", "got Infinity, expected a finite number"),
        ({"guidance_scale": float("nan")}, "guidance_scale", "got NaN, expected a finite number"),
        ({"guidance_scale": 100.5}, "guidance_scale", "nearest valid: 100"),
        ({"guidance_scale": "5"}, "guidance_scale", 'got "5", expected a valid number'),
        ({"guidance_scale": 10**400}, "guidance_scale", "expected a valid number"),
        ({"guidance_scale_2": 3.0}, "guidance_scale_2", "wan has one expert; leave it out"),
        ({"flow_shift": 0}, "flow_shift", "expected greater than 0"),
        ({"seed": -1}, "seed", "nearest valid: 0"),
        ({"seed": 2**63}, "seed", f"nearest valid: {2**63 - 1}"),
        ({"max_sequence_length": 513}, "max_sequence_length", "nearest valid: 512"),
        ({"outputs": "sheet"}, "outputs", "expected a valid list"),
        ({"outputs": ["gif"]}, "outputs.0", "got \"gif\", expected 'sheet' or 'frames'"),
        ({"outputs": ["sheet", "sheet"]}, "outputs", "each output once"),
        ({"model": 5}, "model", "expected a valid string"),
        ({"input_reference": None}, "input_reference", "video from text alone"),
        ({"input_reference": {"file": ""}}, "input_reference", "video from text alone"),
    ],
)
def test_wrong_values_are_named_with_the_cure(fields: dict[str, Any], param: str, words: str):
    with pytest.raises(InvalidValue, match=words) as caught:
        params(**fields)
    assert caught.value.param == param


def test_nearest_sizes_are_themselves_valid():
    for sent in ("192x96", "99984x16", "16x99984", "112x96"):
        with pytest.raises(InvalidValue) as caught:
            params(size=sent)
        nearest = caught.value.message.rsplit(" ", 1)[1]
        assert f"{params(size=nearest).width}x{params(size=nearest).height}" == nearest


def test_all_faults_are_told_at_once():
    with pytest.raises(InvalidValue) as caught:
        parse_request({"fps": 0, "seed": "x"})
    assert caught.value.param == "prompt"
    assert all(f"{name}:" in caught.value.message for name in ("prompt", "fps", "seed"))


def test_unknown_fields_are_refused_with_the_likely_name():
    with pytest.raises(UnknownField, match="num_frame: unknown field; did you mean num_frames") as caught:
        params(num_frame=5)
    assert caught.value.param == "num_frame"
    with pytest.raises(UnknownField, match="allowed: prompt, model"):
        params(**{"\ud800": 5})


def test_models():
    two = [card("wan"), card("big")]
    assert resolve(parse_request({"prompt": "a", "model": "big"}), two).model == "big"
    with pytest.raises(InvalidValue, match="model: required when several are served"):
        resolve(parse_request({"prompt": "a"}), two)
    with pytest.raises(UnknownModel, match=r'model: got "sora-2", expected one of \["wan"\]'):
        params(model="sora-2")


def test_the_second_expert_s_guidance_follows_request_then_model_then_the_first():
    assert params(experts=2, guidance_scale=2.0, guidance_scale_2=3.0).guidance_scale_2 == 3.0
    assert params(experts=2, guidance_scale=2.0).guidance_scale_2 == 2.0
    configured = [card(experts=2, guidance_scale_2=4.0)]
    assert resolve(parse_request({"prompt": "a", "guidance_scale": 2.0}), configured).guidance_scale_2 == 4.0


def test_multipart_knows_the_kind_of_every_field():
    schema = VideoRequest.model_json_schema()["properties"]
    kinds = {name: {kind.get("type") for kind in field.get("anyOf", [field])} for name, field in schema.items()}
    assert {
        name for name, kind in kinds.items() if kind & {"integer", "number"} and "string" not in kind
    } == FORM.numbers
    assert {name for name, kind in kinds.items() if "array" in kind} == FORM.lists


awkward_text = st.text("a5x.- \x00\ud800\u0665", max_size=6)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | awkward_text, lambda inner: st.lists(inner, max_size=3)
)


@settings(deadline=None)  # a busy machine is no fault
@given(st.dictionaries(st.sampled_from([*VideoRequest.model_fields, "x"]), json_values, max_size=4))
def test_whatever_comes_is_valid_or_an_api_error(fields: dict[str, Any]):
    with contextlib.suppress(ApiError):
        got = params(**fields)
        assert got.num_frames % 4 == 1
        assert got.width % 16 == got.height % 16 == 0
