"""Worlds over HTTP, for tests: open, move, look."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from typing import Any

import httpx
import imageio.v3 as iio
import numpy as np

from tests.serving import Serving, wait_until

ANSWER_S = 240.0
"""Longest wait for an answer while a process is being replaced."""


def image(seed: int = 0) -> str:
    """A picture of 72 x 48 pixels, random blocks, as a PNG file in base64."""
    blocks = np.random.default_rng(seed).integers(0, 256, (6, 9, 3), dtype=np.uint8)
    return base64.b64encode(iio.imwrite("<bytes>", blocks.repeat(8, 0).repeat(8, 1), extension=".png")).decode()


class Client:
    """Asks again while the application is away, as a careful user does: every request here is safe to repeat."""

    def __init__(self, served: Serving) -> None:
        self._http = served.client()
        self._http.timeout = httpx.Timeout(ANSWER_S)

    def ask(self, method: str, path: str, **fields: Any) -> httpx.Response:
        """The first answer that is not a 503 or a broken connection."""
        answers: list[httpx.Response] = []

        def answered() -> bool:
            try:
                answers.append(self._http.request(method, path, **fields))
            except httpx.TransportError:
                return False
            return answers[-1].status_code != 503

        wait_until(answered, ANSWER_S, f"{method} {path}")
        return answers[-1]

    def open(self, **fields: Any) -> str:
        """The id of a new world."""
        body = {"prompt": "a red room", "image": image(), "seed": 5, "cache": "off", **fields}
        answer = self.ask("POST", "/v1/worlds", json=body)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["id"])

    def move(self, world: str, after: int, **fields: Any) -> list[dict[str, Any]]:
        """Make the chunks that come after so many; repeated after a loss, the request makes none twice."""
        answer = self.ask("POST", f"/v1/worlds/{world}/chunks", json={"after": after, **fields})
        assert answer.status_code == 200, answer.text
        data: list[dict[str, Any]] = answer.json()["data"]
        return data

    def walk(self, world: str, path: Sequence[dict[str, Any]], start: int = 0) -> list[dict[str, Any]]:
        """A chunk for each item of the path; their receipts."""
        return [self.move(world, start + n, **fields)[0] for n, fields in enumerate(path)]

    def frames(self, world: str, chunk: int) -> np.ndarray:
        """[F, H, W, 3] uint8."""
        answer = self.ask("GET", f"/v1/worlds/{world}/chunks/{chunk}/content", params={"variant": "frames"})
        assert answer.status_code == 200, answer.text
        found: np.ndarray = np.load(io.BytesIO(answer.content))["frames"]
        return found

    def cold(self, path: Sequence[dict[str, Any]], **fields: Any) -> list[np.ndarray]:
        """Frames of every chunk of a world of its own that makes this path without an interruption."""
        world = self.open(**fields)
        self.walk(world, path)
        return [self.frames(world, chunk) for chunk in range(len(path))]

    def assert_equal(self, world: str, expected: Sequence[np.ndarray], start: int = 0) -> None:
        """The world's chunks from `start` on are these, byte for byte."""
        for chunk, frames in enumerate(expected[start:], start=start):
            assert np.array_equal(self.frames(world, chunk), frames), f"chunk {chunk} of {world}"
