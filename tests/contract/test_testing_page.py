"""docs/testing.md names tests by path: all of them exist, and its 32 checks of the step cache are all there."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path("docs/testing.md").read_text()
FOLDERS = {
    "cache/": "tests/unit/deployments/stage_cache/",
    "wan/": "tests/unit/deployments/wan/",
    "jobs/": "tests/unit/app/jobs/",
}
NAMED = re.findall(r"`([\w/]+\.py)::(\w+)`", PAGE)
ROWS = re.findall(r"^\| (\d+) \|.*$", PAGE, re.MULTILINE)


def test_every_named_test_exists() -> None:
    assert len(NAMED) >= len(ROWS) == 32
    missing = []
    for path, name in NAMED:
        folder = next((full for short, full in FOLDERS.items() if path.startswith(short)), None)
        file = Path(path if folder is None else folder + path.split("/", 1)[1])
        if not file.is_file() or not re.search(rf"^(async )?def {name}\(", file.read_text(), re.MULTILINE):
            missing.append(f"{path}::{name}")
    assert missing == []


def test_every_check_has_one_row_with_a_test() -> None:
    assert [int(number) for number in ROWS] == list(range(1, 33))
    for row in re.findall(r"^\| \d+ \|.*$", PAGE, re.MULTILINE):
        assert "::test_" in row
