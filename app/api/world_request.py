"""What a client may ask of worlds, and how it becomes `WorldParams` and `ChunkRequest`: checked, never rounded."""

from __future__ import annotations

import base64
import binascii
import io
import secrets
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import numpy as np
from PIL import Image, UnidentifiedImageError
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PlainValidator, WithJsonSchema

from app.api.body import FormFields
from app.api.errors import InvalidValue, UnknownModel, shown
from app.api.field_types import SIZE_PATTERN, Size, not_blank, size_text, words
from app.api.validation import validated
from app.api.video_request import DRAWN_SEEDS
from app.worlds.world_card import WorldCard
from app.worlds.world_request import ChunkRequest, Hold, Moves, PoseGrid, WorldParams
from deployments.lingbot.controls import Poses
from deployments.lingbot.stream_config import FRAMES_PER_LATENT, fit_size
from deployments.lingbot.text_encoder import clean_prompt

KeyName = Literal["w", "a", "s", "d", "i", "j", "k", "l", "up", "down", "left", "right"]
LETTERS: dict[str, str] = {"up": "i", "down": "k", "left": "j", "right": "l"}
"""Other names of keys that look around."""
IMAGE_FORMATS = ("PNG", "JPEG", "WEBP")

Prompt = Annotated[str, AfterValidator(words), AfterValidator(not_blank), Field(min_length=1)]
Pose = list[Annotated[list[float], Field(min_length=4, max_length=4)]]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class WorldBody(_Body):
    """Body of `POST /v1/worlds`."""

    prompt: Prompt = Field(description="What the world shows.")
    image: str = Field(min_length=1, description="The first frame: a PNG, JPEG or WebP file in base64.")
    model: str | None = Field(None, description="Name from `GET /v1/models`; optional when one is served.")
    size: Annotated[
        Size | None,
        PlainValidator(size_text),
        WithJsonSchema({"anyOf": [{"type": "string", "pattern": SIZE_PATTERN}, {"type": "null"}]}),
    ] = Field(None, description='"WIDTHxHEIGHT" in pixels, multiples of 16.')
    seed: int | None = Field(None, ge=0, le=2**63 - 1, description="Of the noise; drawn below 2^53 when absent.")
    cache: Literal["auto", "off"] | None = Field(None, description="off: neither take chunks of other worlds nor give.")


FORM = FormFields(numbers=frozenset({"seed"}), lists=frozenset(), files=frozenset({"image"}))
"""`WorldBody` in multipart text."""


class Move(_Body):
    """Keys held down together for some time: `frames` or `seconds`."""

    keys: list[KeyName] = Field(description="Held down together; empty: the camera rests.")
    frames: int | None = Field(None, ge=1, le=100_000, description="Video frames.")
    seconds: float | None = Field(None, gt=0, le=10_000, description="A whole number of video frames.")


class ChunkBody(_Body):
    """Body of `POST /v1/worlds/{world_id}/chunks`: one of keys, moves and poses."""

    keys: list[KeyName] | None = Field(None, description="Held down together for `chunks` whole chunks.")
    chunks: int | None = Field(None, ge=1, description="With keys: how many chunks.")
    moves: Annotated[list[Move], Field(min_length=1)] | None = Field(
        None, description="One after the other; what is left of the last chunk the camera rests."
    )
    poses: Annotated[list[Annotated[Pose, Field(min_length=4, max_length=4)]], Field(min_length=1)] | None = Field(
        None, description="Camera-to-world matrices, one for each latent frame; x right, y down, z forward."
    )
    prompt: Prompt | None = Field(None, description="What the world shows from the first of these chunks on.")
    after: int | None = Field(None, ge=0, description="Chunks the world has; makes the request safe to repeat.")


class BoundaryBody(_Body):
    """Body of `POST .../fork` and `POST .../rewind`."""

    chunks: int = Field(ge=0, description="Chunks that stay.")


CHUNK_FORM = FormFields(numbers=frozenset({"chunks", "after"}), lists=frozenset({"keys"}))
BOUNDARY_FORM = FormFields(numbers=frozenset({"chunks"}), lists=frozenset())


def world_params(
    fields: dict[str, Any], cards: Sequence[WorldCard], max_image_bytes: int
) -> tuple[WorldParams, np.ndarray]:
    """The world to open and its image, RGB [H, W, 3] uint8.  Raises UnknownModel, InvalidValue, UnknownField."""
    body = validated(WorldBody, fields)
    card = card_named(body.model, cards)
    image = _image(body.image, card, max_image_bytes)
    return WorldParams(
        model=card.name,
        prompt=_prompt(body.prompt, card),
        seed=secrets.randbelow(DRAWN_SEEDS) if body.seed is None else body.seed,
        **_size(body.size, image, card),
        shared=body.cache != "off",
    ), image


def chunk_request(fields: dict[str, Any], card: WorldCard) -> ChunkRequest:
    """The chunks to make.  Raises InvalidValue, UnknownField."""
    body = validated(ChunkBody, fields)
    given = [name for name in ("keys", "moves", "poses") if getattr(body, name) is not None]
    if len(given) != 1:
        raise InvalidValue(
            f"keys, moves, poses: got {', '.join(given) or 'none'}, expected one of them; "
            'for example {"keys": ["w", "left"]}',
            given[1] if given else "keys",
        )
    if body.chunks is not None and body.keys is None:
        raise InvalidValue(f"chunks: goes with keys alone, not with {given[0]}; leave it out", "chunks")
    prompt = None if body.prompt is None else _prompt(body.prompt, card)
    if body.keys is not None:
        _at_most("chunks", body.chunks or 1, card)
        camera: Hold | Moves | PoseGrid = Hold(keys=_letters(body.keys), chunks=body.chunks or 1)
    elif body.moves is not None:
        moves = tuple((_letters(move.keys), _frames(n, move, card)) for n, move in enumerate(body.moves))
        _at_most("moves", -(-sum(frames for _, frames in moves) // (FRAMES_PER_LATENT * card.stream.chunk)), card)
        camera = Moves(moves=moves)
    else:
        assert body.poses is not None
        camera = _poses(body.poses, card)
    return ChunkRequest(camera=camera, prompt=prompt, after=body.after)


def boundary(fields: dict[str, Any]) -> int:
    """Chunks that stay.  Raises InvalidValue, UnknownField."""
    return validated(BoundaryBody, fields).chunks


def card_named(name: str | None, cards: Sequence[WorldCard]) -> WorldCard:
    """The model of that name, or the only one.  Raises UnknownModel, InvalidValue."""
    names = [card.name for card in cards]
    if name is None:
        if len(cards) == 1:
            return cards[0]
        raise InvalidValue(f"model: required when several are served; expected one of {shown(names)}", "model")
    if name not in names:
        raise UnknownModel(f"model: got {shown(name)}, expected one of {shown(names)}", "model")
    return cards[names.index(name)]


def _letters(keys: Sequence[str]) -> str:
    return "".join(sorted({LETTERS.get(key, key) for key in keys}))


def _frames(number: int, move: Move, card: WorldCard) -> int:
    name = f"moves.{number}"
    if (move.frames is None) == (move.seconds is None):
        raise InvalidValue(f"{name}: expected either frames or seconds", name)
    if move.frames is not None:
        return move.frames
    assert move.seconds is not None
    exact = move.seconds * card.fps
    frames = max(1, round(exact))
    if abs(exact - frames) > 1e-6:  # decimals such as 0.3 are not exact in binary; a frame is 1
        raise InvalidValue(
            f"{name}.seconds: got {move.seconds:g}, which at {card.fps} fps is {exact:g} frames; expected a whole "
            f"number of frames, nearest valid: {frames / card.fps:g}",
            f"{name}.seconds",
        )
    return frames


def _poses(matrices: list[Pose], card: WorldCard) -> PoseGrid:
    chunk = card.stream.chunk
    if len(matrices) % chunk:
        raise InvalidValue(
            f"poses: got {len(matrices)}, expected a multiple of {chunk}, the latent frames of a chunk; nearest valid: "
            f"{max(chunk, len(matrices) // chunk * chunk)}",
            "poses",
        )
    _at_most("poses", len(matrices) // chunk, card)
    try:
        return PoseGrid(grid=Poses.of(matrices).grid)
    except ValueError as error:
        raise InvalidValue(str(error), "poses") from None


def _at_most(name: str, chunks: int, card: WorldCard) -> None:
    bound = card.limits.max_request_chunks
    if chunks > bound:
        raise InvalidValue(f"{name}: got {chunks} chunks, at most {bound} allowed in one request", name)


def _prompt(text: str, card: WorldCard) -> str:
    if len(text) > card.limits.max_prompt_chars:
        raise InvalidValue(
            f"prompt: got {len(text)} characters, at most {card.limits.max_prompt_chars} allowed", "prompt"
        )
    return clean_prompt(text)


def _size(size: Size | None, image: np.ndarray, card: WorldCard) -> dict[str, int]:
    if size is None:
        try:
            height, width = fit_size(card.default_pixels, image.shape[0], image.shape[1])
        except ValueError as error:
            raise InvalidValue(str(error), "image") from None
        return {"width": width, "height": height}
    if size.width * size.height > card.limits.max_pixels:
        raise InvalidValue(
            f"size: got {size.width}x{size.height} = {size.width * size.height} pixels, at most "
            f"{card.limits.max_pixels} allowed: larger worlds do not fit into the memory kept for one",
            "size",
        )
    return {"width": size.width, "height": size.height}


def _image(text: str, card: WorldCard, max_bytes: int) -> np.ndarray:
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise InvalidValue(f"image: got {shown(text[:40])}, expected an image file in base64", "image") from None
    if len(data) > max_bytes:
        raise InvalidValue(f"image: got {len(data)} bytes, at most {max_bytes} allowed", "image")
    try:
        with Image.open(io.BytesIO(data), formats=IMAGE_FORMATS) as picture:
            pixels = picture.width * picture.height
            if pixels > card.limits.max_image_pixels:
                raise InvalidValue(
                    f"image: got {picture.width}x{picture.height} = {pixels} pixels, at most "
                    f"{card.limits.max_image_pixels} allowed",
                    "image",
                )
            return np.asarray(picture.convert("RGB"))
    except (UnidentifiedImageError, OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise InvalidValue(
            f"image: cannot be read ({error}); expected a PNG, JPEG or WebP file in base64", "image"
        ) from None
