"""docs/contracts/caches.md against the code, and what a server without the cache imports."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from cache_actors import latent_cache_actor
from cache_actors.latent_audit import EVENTS
from cache_actors.latent_config import ApproximateConfig, LatentCacheConfig
from cache_actors.latent_key import _PARTITION, _REQUEST, _TRAJECTORY
from cache_actors.latent_report import CacheReport, Reason

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "contracts" / "caches.md").read_text(encoding="utf-8")


def table(section: str) -> list[list[str]]:
    """Rows of the only table of a section, header left out, cells without backticks."""
    text = re.search(rf"^## {section}\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert text is not None, f"no section {section}"
    lines = [line for line in text[1].splitlines() if line.startswith("|")]
    return [[cell.strip().replace("`", "") for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_keys() -> None:
    rows = {row[0]: [cell == "=" for cell in row[1:]] for row in table("Keys")}
    names = dict.fromkeys([*_PARTITION, *_TRAJECTORY, *_REQUEST])
    assert rows == {name: [name in _PARTITION, name in _TRAJECTORY, name in _REQUEST] for name in names}


def test_report_reasons_events() -> None:
    assert [row[0] for row in table("Report")] == list(CacheReport.model_fields)
    assert [row[0] for row in table("Reasons")] == [str(reason) for reason in Reason]
    assert {row[0] for row in table("Audit")} == EVENTS


@pytest.mark.parametrize(
    ("section", "model"), [("Configuration", LatentCacheConfig), ("Approximate", ApproximateConfig)]
)
def test_configuration(section: str, model: type) -> None:
    rows = {row[0]: row[1] for row in table(section)}
    assert list(rows) == list(model.model_fields)
    for name, field in model.model_fields.items():
        if name not in ("similarity_map", "embedder", "floors"):
            assert rows[name] == str(field.default)


def test_metrics() -> None:
    source = Path(latent_cache_actor.__file__).read_text()
    code = {f"worldstage_latent_cache_{name}" for name in re.findall(r'f"\{prefix\}_(\w+)"', source)}
    assert {row[0] for row in table("Metrics")} == code


def test_the_configuration_alone_imports_nothing_of_the_cache() -> None:
    code = (
        "import sys, cache_actors.latent_config; print(sorted(m for m in sys.modules if m.startswith('cache_actors')))"
    )
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert out.strip() == "['cache_actors', 'cache_actors.closed', 'cache_actors.latent_config']"
