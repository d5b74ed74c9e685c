"""docs/contracts/videos.md against the code: its tables must be the app's routes, fields, states, files and errors."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from app.api.application import make_app
from app.api.errors import ApiError
from app.api.video_content import FILES
from app.api.video_request import VideoRequest
from app.api.video_resource import Video, video_of
from app.config import Http, VideoDefaults, VideoLimits
from app.driver.job_state import TRANSITIONS, Job, JobView, VideoParams
from tests.fake_jobs import FakeJobs, card

PAGE = Path(__file__).parents[2] / "docs" / "contracts" / "videos.md"


def table(section: str) -> list[list[str]]:
    """Rows of the only table of a section, header left out, cells without backticks."""
    text = re.search(rf"^## {section}\n(.*?)(?=^## |\Z)", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert text is not None, f"no section {section}"
    lines = [line for line in text[1].splitlines() if line.startswith("|")]
    return [[cell.strip().replace("`", "") for cell in line.strip("|").split("|")] for line in lines[2:]]


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    jobs = FakeJobs()
    return make_app(jobs, [card()], jobs.files, Http()).openapi()


def test_endpoints_and_their_statuses(schema: dict[str, Any]):
    code = {
        (method.upper(), path): set(operation["responses"])
        for path, operations in schema["paths"].items()
        for method, operation in operations.items()
    }
    assert {(method, path): set(statuses.split()) for method, path, _, statuses in table("Endpoints")} == code


def test_request_fields_types_and_bounds():
    page = {name: (kind, allowed) for name, kind, allowed, _ in table("Request")}
    properties = VideoRequest.model_json_schema()["properties"]
    assert list(page) == list(properties)
    for name, field in properties.items():
        kinds = [kind for kind in field.get("anyOf", [field]) if kind["type"] != "null"]
        assert " or ".join(kind["type"] for kind in kinds) == page[name][0], name
        bounds = {str(kind[key]) for kind in kinds for key in ("minimum", "exclusiveMinimum", "maximum") if key in kind}
        assert bounds <= set(re.findall(r"\d+", page[name][1])), name
    assert [name for name, _, _, absent in table("Request") if absent == "refused"] == ["prompt"]


def test_every_default_and_limit_the_page_names_exists():
    cells = " ".join(cell for row in table("Request") for cell in row)
    assert set(re.findall(r"defaults\.(\w+)", cells)) == set(VideoDefaults.model_fields) - {"flow_shift"}
    assert set(re.findall(r"limits\.(\w+)", cells)) == set(VideoLimits.model_fields)


def test_job_fields():
    assert [name for name, _ in table("Job")] == list(Video.model_fields)


def test_states():
    params = VideoParams(
        model="wan",
        prompt="a",
        negative_prompt="",
        width=16,
        height=16,
        num_frames=1,
        fps=16,
        num_inference_steps=1,
        guidance_scale=1,
        guidance_scale_2=None,
        flow_shift=1,
        seed=0,
        max_sequence_length=1,
    )
    code = []
    for state, following in TRANSITIONS.items():
        job = Job(id="a", params=params, state=state, created_at=0, fingerprint="f")
        code.append([state, video_of(JobView(job=job, progress=0)).status, " ".join(sorted(following))])
    assert table("States") == code


def test_files():
    assert [row[:3] for row in table("Files")] == [[name, kind.name, kind.media_type] for name, kind in FILES.items()]


def test_errors():
    errors = [error for error in ApiError.__subclasses__() if error.__module__ == ApiError.__module__]
    code = [[str(error.status), error.type, error.code] for error in errors]
    assert [row[:3] for row in table("Errors")] == code


def test_the_headers_of_sync(schema: dict[str, Any]):
    headers = schema["paths"]["/v1/videos/sync"]["post"]["responses"]["200"]["headers"]
    assert all(f"`{name}`" in PAGE.read_text() for name in headers)
