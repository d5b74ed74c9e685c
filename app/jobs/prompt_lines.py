"""A prompts file: a video a line, as plain text or as a JSON object with the fields of a video request.

    a red circle moving right
    {"prompt": "a blue square", "seed": 7, "num_frames": 33}

Every line is checked before anything is started, so that a typing error in line 900 does not show after hours.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.api.errors import ApiError
from app.api.video_request import parse_request


class PromptsError(ValueError):
    """What is wrong with the file, a line for each fault."""


@dataclass(frozen=True)
class PromptLine:
    """One video to make."""

    number: int
    """Line in the file, from 1."""
    fields: dict[str, Any]
    """Body of the request."""
    key: str
    """SHA-256 (hex) of the fields and of how many equal lines stand before: names the video in the manifest, wherever
    its line moves to.  Equal lines are videos of their own, for each draws its seed."""


def read_prompts(path: Path) -> list[PromptLine]:
    """The videos of a file.  Raises PromptsError with every fault found."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PromptsError(f"{path}: {error}; expected a text file in UTF-8 with a prompt a line") from error
    lines, faults, seen = [], [], Counter[str]()
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            fields = _fields(line.strip())
            parse_request(fields)
        except (ValueError, ApiError) as error:
            faults.append(f"{path}:{number}: {error}")
            continue
        content = json.dumps(fields, sort_keys=True)
        key = hashlib.sha256(f"{content}\n{seen[content]}".encode()).hexdigest()
        seen[content] += 1
        lines.append(PromptLine(number, fields, key))
    if faults:
        raise PromptsError("\n".join(faults))
    if not lines:
        raise PromptsError(f"{path}: empty; expected a prompt a line")
    return lines


def _fields(line: str) -> dict[str, Any]:
    if not line:
        raise ValueError("the line is empty; remove it, or write a prompt")
    if not line.startswith("{"):
        return {"prompt": line}
    try:
        fields: dict[str, Any] = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"the line starts as a JSON object and is none: {error}") from error
    return fields
