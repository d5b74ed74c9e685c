"""What a client may ask for, and how it becomes `VideoParams`: checked against one model's limits, filled from its
defaults, never rounded.

`VideoRequest` holds what is true for every model; `resolve` adds what depends on the model.
"""

from __future__ import annotations

import math
import re
import secrets
from collections.abc import Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PlainValidator, WithJsonSchema

from app.api.body import FormFields
from app.api.errors import InvalidValue, UnknownModel, shown
from app.api.field_types import SIZE_PATTERN, Size, not_blank, size_text, words
from app.api.validation import validated
from app.config import VideoLimits
from app.driver.job_state import VideoParams
from app.model_card import ModelCard
from cache_actors.latent_report import Word

DRAWN_SEEDS = 2**53
"""A drawn seed is below this: the largest range of integers that JSON clients with doubles show unchanged."""

_SECONDS = r"^(0|[1-9][0-9]{0,5})(\.[0-9]{1,9})?$"
_PROMPT = r"^[^\u0000]*\S[^\u0000]*$"


def _seconds(value: object) -> Fraction | None:
    if value is None:
        return None
    if isinstance(value, float) and math.isfinite(value):
        value = Decimal(repr(value))
    text = format(value, "f") if isinstance(value, Decimal) else value
    text = str(text) if isinstance(text, int) and not isinstance(text, bool) else text
    if not isinstance(text, str) or not re.fullmatch(_SECONDS, text, re.ASCII):
        raise ValueError('expected a number of seconds, such as "4" or 0.5, at most 999999 and with 9 decimals')
    return Fraction(text)


def _distinct(value: list[str] | None) -> list[str] | None:
    if value is not None and len(set(value)) != len(value):
        raise ValueError("expected each output once")
    return value


class VideoRequest(BaseModel):
    """Body of `POST /v1/videos` and `POST /v1/videos/sync`; what is absent or null takes the model's default."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    prompt: Annotated[
        str,
        AfterValidator(words),
        AfterValidator(not_blank),
        Field(min_length=1, description="What the video shows.", json_schema_extra={"pattern": _PROMPT}),
    ]
    model: str | None = Field(None, description="Name from `GET /v1/models`; optional when one model is served.")
    size: Annotated[
        Size | None,
        PlainValidator(size_text),
        WithJsonSchema({"anyOf": [{"type": "string", "pattern": SIZE_PATTERN}, {"type": "null"}]}),
    ] = Field(None, description='"WIDTHxHEIGHT" in pixels, multiples of 16.')
    seconds: Annotated[
        Fraction | None,
        PlainValidator(_seconds),
        WithJsonSchema(
            {
                "anyOf": [
                    {"type": "string", "pattern": _SECONDS},
                    {"type": "number", "minimum": 0, "maximum": 999999},
                    {"type": "null"},
                ]
            }
        ),
    ] = Field(None, description="Another way to give num_frames = seconds * fps + 1, which must be 4k + 1.")
    num_frames: int | None = Field(None, ge=1, description="Frames of the video, 4k + 1.")
    fps: int | None = Field(None, ge=1, le=120, description="Frames a second of the file.")
    num_inference_steps: int | None = Field(None, ge=1, description="Solver steps.")
    guidance_scale: float | None = Field(None, ge=0, le=100, description="1 or less runs the positive branch alone.")
    guidance_scale_2: float | None = Field(
        None, ge=0, le=100, description="Guidance of the low-noise expert; only for models with two experts."
    )
    flow_shift: float | None = Field(None, gt=0, le=100, description="Shift of the flow-matching noise schedule.")
    negative_prompt: Annotated[
        str | None,
        AfterValidator(lambda value: value if value is None else words(value)),
    ] = Field(None, description="What the video should not show.")
    seed: int | None = Field(None, ge=0, le=2**63 - 1, description="Of the noise; drawn below 2^53 when absent.")
    max_sequence_length: int | None = Field(None, ge=1, description="Text tokens; a longer prompt is cut there.")
    step_cache: Literal["auto", "off"] | None = Field(
        None, description="off: compute every step; auto: reuse those of the model's step-cache profile, if it fits."
    )
    latent_cache: Word | None = Field(
        None,
        description="What the latent cache may answer with. off: nothing; exact: work of the very same request; "
        "approximate: also a similar prompt's latents; refresh: nothing, and what is stored is replaced.",
    )
    seed_policy: Literal["own", "donor"] | None = Field(
        None, description="donor: latents from another seed's initial noise will do; own: they must be of this seed."
    )
    outputs: Annotated[
        Annotated[list[Literal["sheet", "frames"]], Field(json_schema_extra={"uniqueItems": True})] | None,
        AfterValidator(_distinct),
    ] = Field(None, description="Files beside the mp4: a PNG sheet of frames, an npz of raw frames.")


FORM = FormFields(
    numbers=frozenset(
        {
            "num_frames",
            "fps",
            "num_inference_steps",
            "guidance_scale",
            "guidance_scale_2",
            "flow_shift",
            "seed",
            "max_sequence_length",
        }
    ),
    lists=frozenset({"outputs"}),
)
"""`VideoRequest` in multipart text; `seconds` stays text, as OpenAI sends it."""


def resolve(request: VideoRequest, cards: Sequence[ModelCard], tenant: str = "default") -> VideoParams:
    """Every effective value of the job.  Raises UnknownModel, InvalidValue."""
    card = _card(request.model, cards)
    defaults, limits = card.defaults, card.limits
    size = request.size or Size(defaults.width, defaults.height)
    _check_pixels(size, limits)
    fps = defaults.fps if request.fps is None else request.fps
    steps = _or(request.num_inference_steps, defaults.num_inference_steps)
    _at_most("num_inference_steps", steps, limits.max_steps)
    tokens = _or(request.max_sequence_length, defaults.max_sequence_length)
    _at_most("max_sequence_length", tokens, limits.max_sequence_length)
    negative = defaults.negative_prompt if request.negative_prompt is None else request.negative_prompt
    for name, text in (("prompt", request.prompt), ("negative_prompt", negative)):
        if len(text) > limits.max_prompt_chars:
            raise InvalidValue(f"{name}: got {len(text)} characters, at most {limits.max_prompt_chars} allowed", name)
    guidance = defaults.guidance_scale if request.guidance_scale is None else request.guidance_scale
    return VideoParams(
        model=card.name,
        prompt=request.prompt,
        negative_prompt=negative,
        width=size.width,
        height=size.height,
        num_frames=_frames(request, fps, card),
        fps=fps,
        num_inference_steps=steps,
        guidance_scale=guidance,
        guidance_scale_2=_second_guidance(request, card, guidance),
        flow_shift=card.flow_shift if request.flow_shift is None else request.flow_shift,
        seed=secrets.randbelow(DRAWN_SEEDS) if request.seed is None else request.seed,
        max_sequence_length=tokens,
        step_cache=request.step_cache or "auto",
        outputs=tuple(request.outputs or ()),
        latent_cache=request.latent_cache or "exact",
        seed_policy=request.seed_policy or "own",
        seed_given=request.seed is not None,
        tenant=tenant,
    )


def seconds_text(num_frames: int, fps: int) -> str:
    """Seconds of a video in the sense of the request's `seconds`: (num_frames - 1) / fps, to six digits."""
    return f"{(num_frames - 1) / fps:.6g}"


def _or(value: int | None, default: int) -> int:
    return default if value is None else value


def _card(name: str | None, cards: Sequence[ModelCard]) -> ModelCard:
    names = [card.name for card in cards]
    if name is None:
        if len(cards) == 1:
            return cards[0]
        raise InvalidValue(f"model: required when several are served; expected one of {shown(names)}", "model")
    if name not in names:
        raise UnknownModel(f"model: got {shown(name)}, expected one of {shown(names)}", "model")
    return cards[names.index(name)]


def _at_most(name: str, value: int, bound: int) -> None:
    if value > bound:
        raise InvalidValue(f"{name}: got {value}, at most {bound} allowed; nearest valid: {bound}", name)


def _check_pixels(size: Size, limits: VideoLimits) -> None:
    pixels = size.width * size.height
    if pixels <= limits.max_pixels:
        return
    shrink = math.sqrt(limits.max_pixels / pixels)  # same shape, as large as allowed
    width = min(max(16, int(size.width * shrink) // 16 * 16), limits.max_pixels // 16 // 16 * 16)
    height = min(max(16, int(size.height * shrink) // 16 * 16), limits.max_pixels // width // 16 * 16)
    raise InvalidValue(
        f"size: got {size.width}x{size.height} = {pixels} pixels, at most {limits.max_pixels} allowed; "
        f"nearest valid of this shape: {width}x{height}",
        "size",
    )


def _frames(request: VideoRequest, fps: int, card: ModelCard) -> int:
    limit = (card.limits.max_frames - 1) // 4 * 4 + 1
    if request.seconds is None:
        frames = Fraction(_or(request.num_frames, card.defaults.num_frames))
        name, got = "num_frames", str(frames)
    else:
        frames = request.seconds * fps + 1
        name, got = "seconds", f"{_decimal(request.seconds)}, which at {fps} fps is {_decimal(frames)} frames"
    if frames % 4 != 1 or frames > limit:
        below = min(limit, math.floor((frames - 1) / 4) * 4 + 1)
        near = [str(below)] if below + 4 > limit else [str(below), str(below + 4)]
        rule = "num_frames" if name == "num_frames" else "seconds * fps + 1"
        raise InvalidValue(
            f"{name}: got {got}; expected {rule} to be 4k + 1, at most {limit}; "
            f"nearest valid num_frames: {' and '.join(near)}" + _as_seconds(name, near, fps),
            name,
        )
    if request.num_frames is not None and frames != request.num_frames:
        raise InvalidValue(
            f"seconds: got {got}, but num_frames is {request.num_frames}; send one of the two, or values that agree",
            "seconds",
        )
    return int(frames)


def _as_seconds(name: str, frames: list[str], fps: int) -> str:
    exact = [
        seconds_text(int(frame), fps)
        for frame in frames
        if Fraction(seconds_text(int(frame), fps)) == Fraction(int(frame) - 1, fps)
    ]
    return f", nearest valid seconds: {' and '.join(exact)}" if name == "seconds" and exact else ""


def _decimal(value: Fraction) -> str:
    return f"{float(value):.10g}"


def _second_guidance(request: VideoRequest, card: ModelCard, guidance: float) -> float | None:
    if card.experts == 1:
        if request.guidance_scale_2 is not None:
            raise InvalidValue(
                f"guidance_scale_2: got {request.guidance_scale_2}, but {card.name} has one expert; leave it out",
                "guidance_scale_2",
            )
        return None
    if request.guidance_scale_2 is not None:
        return request.guidance_scale_2
    return guidance if card.defaults.guidance_scale_2 is None else card.defaults.guidance_scale_2


def parse_request(fields: dict[str, Any]) -> VideoRequest:
    """Fields as a request.  Raises InvalidValue, UnknownField."""
    if "input_reference" in fields:
        raise InvalidValue(
            "input_reference: not allowed; the served models make video from text alone. Leave it out",
            "input_reference",
        )
    return validated(VideoRequest, fields)
