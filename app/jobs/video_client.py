"""The HTTP calls of a job that makes videos.  What passes is tried again: a full queue, a driver that restarts."""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FINAL = ("completed", "failed", "cancelled")
PATIENCE_S = 120.0
"""Longest time without an answer before a video is given up: a restart of the head's processes takes less."""
PAUSE_S = 1.0
CALL_TIMEOUT_S = 60.0
CHUNK_BYTES = 1 << 20


class Refused(RuntimeError):
    """The application says no, and would again; the message is its own."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(status, message)
        self.status, self.message = status, message

    def __str__(self) -> str:
        return f"{self.status}: {self.message}"


class Stopped(RuntimeError):
    """The caller wants to stop."""


@dataclass(frozen=True)
class Downloaded:
    """A file that has arrived whole."""

    sha256: str
    bytes: int


class VideoClient:
    """address: as `served` gives it.  stop: set to end every wait, which then raises Stopped.  Safe from any thread."""

    def __init__(self, address: str, stop: threading.Event) -> None:
        self._address, self._stop = address, stop

    def models(self) -> dict[str, dict[str, Any]]:
        """The served models by name."""
        return {model["id"]: model for model in self._json("GET", "/v1/models")["data"]}

    def create(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """A new job; waits while the queue is full.  Raises Refused."""
        job: dict[str, Any] = self._json("POST", "/v1/videos", fields)
        return job

    def get(self, job_id: str) -> dict[str, Any]:
        """The job now.  Raises Refused."""
        job: dict[str, Any] = self._json("GET", f"/v1/videos/{job_id}")
        return job

    def cancel(self, job_id: str) -> None:
        """End a job, also while everything stops; one that is final already stays as it is."""
        request = urllib.request.Request(f"{self._address}/v1/videos/{job_id}/cancel", method="POST")
        try:
            urllib.request.urlopen(request, timeout=CALL_TIMEOUT_S).close()
        except urllib.error.HTTPError as error:
            if error.code not in (404, 409):
                raise Refused(error.code, _message(error)) from error

    def download(self, job_id: str, path: Path) -> Downloaded:
        """The job's mp4, renamed to `path` once it is whole.  Raises Refused."""
        part = path.with_suffix(".part")
        with self._open("GET", f"/v1/videos/{job_id}/content") as response, part.open("wb") as file:
            digest = hashlib.sha256()
            while chunk := response.read(CHUNK_BYTES):
                digest.update(chunk)
                file.write(chunk)
            size = file.tell()
            expected = response.headers.get("Content-Length")
            if expected is not None and size != int(expected):
                raise Refused(200, f"{job_id}: {size} of {expected} bytes arrived")
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
        return Downloaded(digest.hexdigest(), size)

    def sleep(self, seconds: float) -> None:
        """Wait; raises Stopped at once when the caller wants to stop."""
        if self._stop.wait(seconds):
            raise Stopped

    def _json(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        with self._open(method, path, body) as response:
            return json.load(response)

    def _open(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> http.client.HTTPResponse:
        data = None if body is None else json.dumps(body).encode()
        headers = {} if body is None else {"Content-Type": "application/json"}
        end = time.monotonic() + PATIENCE_S
        while True:
            request = urllib.request.Request(f"{self._address}{path}", data, headers, method=method)
            try:
                response: http.client.HTTPResponse = urllib.request.urlopen(request, timeout=CALL_TIMEOUT_S)
            except urllib.error.HTTPError as error:
                full = error.code == 429
                if not full and (error.code != 503 or time.monotonic() > end):
                    raise Refused(error.code, _message(error)) from error
                self.sleep(float(error.headers.get("Retry-After") or PAUSE_S))
            except OSError as error:  # no connection, or it broke
                if time.monotonic() > end:
                    raise Refused(0, f"{self._address} has not answered for {PATIENCE_S:g} s: {error}") from error
                self.sleep(PAUSE_S)
            else:
                return response


def _message(error: urllib.error.HTTPError) -> str:
    text = error.read().decode(errors="replace")
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return text.strip() or str(error.reason)
