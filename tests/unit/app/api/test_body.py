from __future__ import annotations

import math
from collections.abc import AsyncIterator

import httpx
import pytest
from fastapi import FastAPI

from app.api.body import FormFields, number, read_json, read_multipart
from app.api.errors import ApiError, InvalidBody, UnknownField
from tests.fake_jobs import FakeJobs

pytestmark = pytest.mark.anyio
FORM = FormFields(numbers={"seed", "scale"}, lists={"outputs"})


def form(*parts: tuple[str, str]) -> bytes:
    return b"".join(
        f'--XX\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'.encode() for name, value in parts
    ) + (b"--XX--\r\n")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b'{"a": 1,}', "not valid JSON"),
        (b"[]", "expected a JSON object"),
        (b'"text"', "expected a JSON object"),
        (b'{"a": "\xff"}', "not valid UTF-8 at byte 7"),
        (b'\xef\xbb\xbf{"a": 1}', "not valid JSON"),
        (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not valid JSON"),
    ],
)
def test_what_is_no_json_object_is_refused(body: bytes, words: str):
    with pytest.raises(InvalidBody, match=words):
        read_json(body)


def test_a_key_sent_twice_is_refused_at_any_depth():
    with pytest.raises(UnknownField, match="more than once") as caught:
        read_json(b'{"a": {"seed": 1, "seed": 2}}')
    assert caught.value.param == "seed"


def test_numbers_beyond_json_reach_the_model_that_names_their_field():
    values = read_json(b'{"a": NaN, "b": 1e999, "c": -Infinity}')
    assert math.isnan(values["a"])
    assert (values["b"], values["c"]) == (math.inf, -math.inf)


def test_multipart_gives_what_json_gives():
    parts = form(("prompt", "é\r\n x"), ("seed", "7"), ("scale", "5.0"), ("outputs", "sheet"), ("outputs", "frames"))
    assert read_multipart(parts, "XX", FORM) == {
        "prompt": "é\r\n x",
        "seed": 7,
        "scale": 5.0,
        "outputs": ["sheet", "frames"],
    }
    assert read_multipart(form(("outputs[]", "sheet")), "XX", FORM) == {"outputs": ["sheet"]}


@pytest.mark.parametrize(
    "text", ["", " 7", "7 ", "+7", "07", "0x7", "1_0", "٧", "nan", "NaN", "inf", "5.", ".5", "1e", "true"]
)
def test_text_that_is_no_json_number_stays_text(text: str):
    assert number(text) == text


@pytest.mark.parametrize(("text", "value"), [("7", 7), ("-0", 0), ("5.0", 5.0), ("1e2", 100.0), ("1e999", math.inf)])
def test_json_numbers_are_read(text: str, value: float):
    assert number(text) == value
    assert type(number(text)) is type(value)


def test_thousands_of_digits_are_no_crash():  # int() refuses more than 4300 digits with a ValueError
    assert number("9" * 5000) == math.inf


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (form(("seed", "1"), ("seed", "1")), UnknownField),
        (form(("prompt", "a"))[:-6], InvalidBody),
        (b"nonsense", InvalidBody),
        (b"", InvalidBody),
        (b"--XX\r\nContent-Disposition: form-data\r\n\r\na\r\n--XX--\r\n", InvalidBody),
        (b'--XX\r\nContent-Disposition: form-data; name="p"\r\n\r\n\xff\r\n--XX--\r\n', InvalidBody),
        (b'--XX\r\nContent-Disposition: form-data; name="\xff"\r\n\r\na\r\n--XX--\r\n', InvalidBody),
    ],
)
def test_bad_multipart_is_refused(body: bytes, error: type[ApiError]):
    with pytest.raises(error):
        read_multipart(body, "XX", FORM)


def test_a_file_is_no_text():
    body = b'--XX\r\nContent-Disposition: form-data; name="prompt"; filename="f"\r\n\r\n\xff\r\n--XX--\r\n'
    assert not isinstance(read_multipart(body, "XX", FORM)["prompt"], str)


@pytest.mark.parametrize(
    ("content_type", "status"),
    [
        ("application/json", 200),
        ("application/json; charset=UTF-8", 200),
        ("application/json; charset=latin-1", 415),
        ("text/plain", 415),
        ("application/x-www-form-urlencoded", 415),
        ("", 415),
        ("multipart/form-data", 400),
        ("multipart/form-data; boundary=", 400),
        ("multipart/form-data; boundary=" + "x" * 500, 400),
        ("/", 415),
    ],
)
async def test_content_types(client: httpx.AsyncClient, content_type: str, status: int):
    answer = await client.post("/v1/videos", content=b'{"prompt": "a"}', headers={"content-type": content_type})
    assert answer.status_code == status
    assert (status == 200) == (answer.json()["error"] is None)


async def test_a_large_body_is_refused_before_it_is_read(app: FastAPI, jobs: FakeJobs):
    read = 0

    async def body() -> AsyncIterator[bytes]:
        nonlocal read
        for _ in range(100):
            read += 1
            yield b"x" * 1000

    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://test") as client:
        for headers, chunks in (({}, 5), ({"content-length": "100000"}, 0)):  # 5: the first sum above 4096 bytes
            read = 0
            answer = await client.post(
                "/v1/videos", content=body(), headers={"content-type": "application/json", **headers}
            )
            assert answer.status_code == 413
            assert answer.json()["error"]["code"] == "body_too_large"
            assert "4096" in answer.json()["error"]["message"]
            assert read == chunks
    assert jobs.created == 0
