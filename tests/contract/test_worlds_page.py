"""docs/contracts/worlds.md against the code: its tables must be the app's routes, fields, variants and errors."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from app.api import world_errors
from app.api.application import make_app
from app.api.errors import ApiError
from app.api.world_content import MEDIA_TYPES
from app.api.world_request import BoundaryBody, ChunkBody, KeyName, WorldBody
from app.api.world_resource import ChunkResource, WorldResource
from app.api.world_stream import MAX_WAITING
from app.config import Http, WorldLimits, Worldstage
from app.validate import find_problems, read_config
from tests.fake_jobs import FakeJobs
from tests.fake_worlds import surface

PAGE = Path(__file__).parents[2] / "docs" / "contracts" / "worlds.md"


def tables(section: str) -> list[list[list[str]]]:
    """Rows of a section's tables, header left out, cells without backticks."""
    text = re.search(rf"^## {section}\n(.*?)(?=^## |\Z)", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert text is not None, f"no section {section}"
    found: list[list[list[str]]] = []
    for lines in re.findall(r"(?:^\|.*\n)+", text[1], re.MULTILINE):
        rows = lines.splitlines()[2:]
        found.append([[cell.strip().replace("`", "") for cell in line.strip("|").split("|")] for line in rows])
    return found


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    jobs = FakeJobs()
    return make_app(jobs, [], jobs.files, Http(), worlds=surface()).openapi()


def test_endpoints_and_their_statuses(schema: dict[str, Any]):
    code = {
        (method.upper(), path): set(operation["responses"])
        for path, operations in schema["paths"].items()
        for method, operation in operations.items()
        if path.startswith("/v1/worlds")
    }
    (rows,) = tables("Endpoints")
    assert {(method, path): set(statuses.split()) for method, path, _, statuses in rows} == code


def test_without_worlds_there_are_no_such_endpoints():
    jobs = FakeJobs()
    paths = make_app(jobs, [], jobs.files, Http()).openapi()["paths"]
    assert not [path for path in paths if "worlds" in path]


def test_request_fields_types_and_bounds():
    (world,), (chunk, edge) = tables("World request"), tables("Chunk request")
    for rows, model in ((world, WorldBody), (chunk, ChunkBody), (edge, BoundaryBody)):
        properties = model.model_json_schema()["properties"]
        assert [row[0] for row in rows] == list(properties)
        for row in rows:
            field = properties[row[0]]
            kinds = [kind for kind in field.get("anyOf", [field]) if kind.get("type") != "null"]
            assert " or ".join(kind["type"] for kind in kinds) == row[1], row[0]
            bounds = {str(kind[key]) for kind in kinds for key in ("minimum", "maximum") if key in kind}
            assert bounds <= set(re.findall(r"\d+", row[2])), row[0]
    required = [row[0] for row in world if row[3] == "refused"]
    assert required == WorldBody.model_json_schema()["required"]
    limits = set(re.findall(r"limits\.(\w+)", PAGE.read_text()))
    assert limits == set(WorldLimits.model_fields)


def test_every_key_is_named():
    text = PAGE.read_text()
    assert all(f"`{key}`" in text for key in KeyName.__args__)  # type: ignore[attr-defined]


def test_resources():
    assert [row[0] for row in tables("World")[0]] == list(WorldResource.model_fields)
    assert [row[0] for row in tables("Chunk")[0]] == list(ChunkResource.model_fields)


def test_content():
    assert [row[:2] for row in tables("Content")[0]] == [list(pair) for pair in MEDIA_TYPES.items()]


def test_the_configurations_that_users_are_shown_are_valid():
    page = (PAGE.parents[1] / "worlds.md").read_text()
    (block,) = re.findall(r"^```yaml\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert Worldstage.model_validate(yaml.safe_load(block)).worlds is not None
    assert find_problems(read_config(PAGE.parents[2] / "configs/demo-worlds.yaml")) == []


def test_stream():
    assert f"up to {MAX_WAITING} requests may wait" in PAGE.read_text()


def test_errors():
    own = [error for error in ApiError.__subclasses__() if error.__module__ == world_errors.__name__]
    code = [[str(error.status), error.type, error.code] for error in own]
    assert [row[:3] for row in tables("Errors")[0]] == code
