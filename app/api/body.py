"""Request bodies, read strictly: what JSON or multipart text could mean twice is refused, never guessed.

Both readers give the same thing, a dict of JSON values, so that a model behind them sees no difference.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Collection
from dataclasses import dataclass, field
from email.message import Message
from typing import Any

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser
from starlette.requests import Request

from app.api.errors import BodyTooLarge, InvalidBody, UnknownField, UnsupportedMediaType, shown

JSON = "application/json"
MULTIPART = "multipart/form-data"
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")  # JSON's own grammar, RFC 8259 section 6
_INTEGER = re.compile(r"-?(0|[1-9][0-9]*)")


@dataclass(frozen=True)
class FormFields:
    """How multipart text becomes JSON values: `numbers` are read as JSON numbers, `lists` may be repeated.

    `files` may be uploaded: they become base64 text, which is how JSON has them.
    """

    numbers: Collection[str]
    lists: Collection[str]
    files: Collection[str] = ()


async def read_fields(request: Request, max_bytes: int, form: FormFields) -> dict[str, Any]:
    """The body's fields.  Raises BodyTooLarge, UnsupportedMediaType, InvalidBody, UnknownField (a field sent twice)."""
    header = Message()
    header["Content-Type"] = request.headers.get("content-type", "")
    kind = header.get_content_type() if header["Content-Type"] else ""
    charset = header.get_param("charset", "utf-8")
    if kind not in (JSON, MULTIPART):
        raise UnsupportedMediaType(f"Content-Type: got {shown(header['Content-Type'])}, expected {JSON} or {MULTIPART}")
    if str(charset).lower() not in ("utf-8", "utf8"):
        raise UnsupportedMediaType(f"Content-Type: got charset {shown(charset)}, expected utf-8")
    body = await read_body(request, max_bytes)
    if kind == JSON:
        return read_json(body)
    boundary = header.get_param("boundary")
    if not isinstance(boundary, str) or not boundary:
        raise InvalidBody("Content-Type: multipart/form-data needs a boundary parameter")
    return read_multipart(body, boundary, form)


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The whole body; stops reading at the first byte above `max_bytes` and raises BodyTooLarge."""
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared[:20]) > max_bytes:
        raise BodyTooLarge(f"body: got {declared[:20]} bytes, allowed are {max_bytes} (http.max_body_bytes)")
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > max_bytes:
            raise BodyTooLarge(f"body: got more than the {max_bytes} bytes allowed (http.max_body_bytes)")
    return bytes(body)


async def expect_no_body(request: Request) -> None:
    """Raises InvalidBody when an endpoint without fields is sent some; an empty JSON object is nothing."""
    if (await read_body(request, 4096)).strip() not in (b"", b"{}"):
        raise InvalidBody("body: this endpoint takes no fields; send no body")


def read_json(body: bytes) -> dict[str, Any]:
    """A JSON object with unique keys; numbers may still be NaN or infinite.  Raises InvalidBody, UnknownField."""
    try:
        # NaN, Infinity and 1e999 become floats here, so that the model can refuse them by the name of their field.
        value = json.loads(_text(body, "body"), object_pairs_hook=_unique)
    except RecursionError:
        raise InvalidBody("body: the JSON is nested too deeply") from None
    except ValueError as error:  # JSONDecodeError, and int() refusing thousands of digits
        raise InvalidBody(f"body: not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise InvalidBody(f"body: got {shown(value)}, expected a JSON object")
    return value


def read_multipart(body: bytes, boundary: str, form: FormFields) -> dict[str, Any]:
    """Form fields as JSON values.  A list field comes once an item, as `name` or (openai client) `name[]`."""
    values: dict[str, Any] = {}
    for part in _parts(body, boundary):
        name, text = part.read()
        item = name.removesuffix("[]")
        if item in form.lists:
            values.setdefault(item, []).append(text)
        elif name in values:
            raise UnknownField(f"{name}: sent more than once; send it once", name)
        elif part.is_file and name in form.files:
            values[name] = base64.b64encode(part.data).decode()
        elif part.is_file:
            values[name] = {"file": text}  # an object: no field takes one, so the model refuses it by name
        else:
            values[name] = number(text) if name in form.numbers else text
    return values


def number(text: str) -> int | float | str:
    """The JSON number `text` spells (inf beyond a double), or `text` when it spells none, for a model to refuse."""
    if _INTEGER.fullmatch(text) and len(text) <= 40:  # beyond every bound, and far below int()'s limit on digits
        return int(text)
    return float(text) if _NUMBER.fullmatch(text) else text


@dataclass
class _Part:
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    data: bytearray = field(default_factory=bytearray)

    def _disposition(self) -> Message:
        message = Message()
        for key, value in self.headers:
            if key.lower() == b"content-disposition":
                message["Content-Disposition"] = _text(value, "Content-Disposition")
        return message

    @property
    def is_file(self) -> bool:
        return self._disposition().get_filename() is not None

    def read(self) -> tuple[str, str]:
        name = self._disposition().get_param("name", None, "Content-Disposition")
        if not isinstance(name, str) or not name:
            raise InvalidBody("body: a multipart part has no name in its Content-Disposition")
        return name, "" if self.is_file else _text(bytes(self.data), name)


def _parts(body: bytes, boundary: str) -> list[_Part]:
    parts: list[_Part] = []
    key, value = bytearray(), bytearray()
    ended: list[bool] = []

    def header_end() -> None:
        parts[-1].headers.append((bytes(key), bytes(value)))
        key.clear()
        value.clear()

    try:
        parser = MultipartParser(
            boundary.encode("latin-1"),
            {
                "on_part_begin": lambda: parts.append(_Part()),
                "on_part_data": lambda data, start, end: parts[-1].data.extend(data[start:end]),
                "on_header_field": lambda data, start, end: key.extend(data[start:end]),
                "on_header_value": lambda data, start, end: value.extend(data[start:end]),
                "on_header_end": header_end,
                "on_end": lambda: ended.append(True),
            },
        )
        parser.write(body)
        parser.finalize()
    except (FormParserError, UnicodeEncodeError) as error:
        raise InvalidBody(f"body: not valid multipart/form-data: {error}") from None
    if not ended:
        raise InvalidBody("body: the multipart data stops before its closing boundary")
    return parts


def _text(raw: bytes, where: str) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        param = None if where == "body" else where
        raise InvalidBody(f"{where}: not valid UTF-8 at byte {error.start}", param) from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise UnknownField(f"{shown(twice)}: sent more than once; send it once", twice)
    return values
