"""The manifest of a folder of videos: JSON lines, one for each thing that happened to a video, the last one counts.

    submitted -> completed | failed | cancelled

Invariant: a line is whole.  It is appended in one write and synced; half a line, left by a power cut, is cut off when
the manifest is opened.  One process at a time holds a manifest.
"""

from __future__ import annotations

import fcntl
import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

Status = Literal["submitted", "completed", "failed", "cancelled"]
NAME = "manifest.jsonl"


class ManifestError(RuntimeError):
    """The manifest cannot be used; the message says why and what to do."""


@dataclass(frozen=True)
class Entry:
    """One line.  What is not known yet is None or empty."""

    key: str
    """`PromptLine.key`."""
    line: int
    """In the prompts file of that run."""
    status: Status
    prompt: str
    request: dict[str, Any]
    """The line's own fields."""
    job_id: str | None = None
    model: str | None = None
    fingerprint: str | None = None
    """SHA-256 of the model's weights."""
    seed: int | None = None
    """The one used."""
    params: dict[str, Any] = field(default_factory=dict)
    """Every effective value."""
    file: str | None = None
    """Beside the manifest."""
    sha256: str | None = None
    bytes: int | None = None
    timings: dict[str, float] = field(default_factory=dict)
    """Seconds by phase."""
    error: str | None = None
    at: str = ""
    """UTC, when the line was written."""


class Manifest:
    """The manifest in `folder`, which is made if absent; a context manager that holds it.

    Raises ManifestError when another process holds it or a line cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / NAME
        self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._descriptor)
            raise ManifestError(
                f"{self.path}: another run writes to it; wait for its end or choose another folder"
            ) from error
        self.last: dict[str, Entry] = {}
        """The last entry by key."""
        try:
            self._read()
        except BaseException:
            os.close(self._descriptor)
            raise

    def __enter__(self) -> Manifest:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._descriptor)

    def append(self, entry: Entry) -> None:
        """Add a line; on the disk when this returns."""
        os.write(self._descriptor, json.dumps(asdict(entry), ensure_ascii=False).encode() + b"\n")
        os.fsync(self._descriptor)
        self.last[entry.key] = entry

    def _read(self) -> None:
        data = self.path.read_bytes()
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            os.ftruncate(self._descriptor, whole)
        for number, line in enumerate(data[:whole].splitlines(), start=1):
            try:
                entry = Entry(**json.loads(line))
            except (ValueError, TypeError) as error:
                raise ManifestError(
                    f"{self.path}:{number}: no entry of a manifest ({error}); move the file away to start anew"
                ) from error
            self.last[entry.key] = entry
