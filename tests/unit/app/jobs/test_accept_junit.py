"""Check 19: exactly four cases, failures visible, the number of videos a property."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import numpy as np
from PIL import Image

from app.jobs.accept.junit import junit
from app.jobs.accept.video_sheet import SheetRow, three_frames, write_sheet
from deployments.stage_cache.gates import GateValues

PASSING = GateValues(videos=36, mean_ssim=0.99, min_video_ssim=0.9, mean_temporal_error_ratio=0.1, latency_ratio=0.9)
NAMES = ["mean_ssim", "min_video_ssim", "mean_temporal_error_ratio", "latency_ratio"]


def suite(gates: GateValues) -> ElementTree.Element:
    return ElementTree.fromstring(junit("pp2-cfg1", gates, {"timed_pairs": "6"}))


def test_exactly_the_four_gates_in_order() -> None:
    found = suite(PASSING)
    assert [case.get("name") for case in found.iter("testcase")] == NAMES
    assert {case.get("classname") for case in found.iter("testcase")} == {"pp2-cfg1"}
    counts = {name: found.get(name) for name in ("tests", "failures", "errors", "skipped")}
    assert counts == {"tests": "4", "failures": "0", "errors": "0", "skipped": "0"}
    assert not list(found.iter("failure"))
    properties = {p.get("name"): p.get("value") for p in found.iter("property")}
    assert properties == {"videos": "36", "timed_pairs": "6"}


def test_a_failed_gate_shows_its_value_unrounded_and_what_is_required() -> None:
    found = suite(PASSING.model_copy(update={"latency_ratio": 0.9000000001}))
    assert found.get("failures") == "1"
    (failed,) = (case for case in found.iter("testcase") if case.find("failure") is not None)
    assert failed.get("name") == "latency_ratio"
    failure = failed.find("failure")
    assert failure is not None
    assert failure.get("message") == "0.9000000001, required <= 0.9"


def test_a_sheet_shows_first_middle_and_last_native_beside_cached(tmp_path: Path) -> None:
    frames = np.zeros((5, 32, 48, 3), dtype=np.uint8)
    frames[0, ..., 0], frames[2, ..., 1], frames[4, ..., 2] = 250, 250, 250
    native = three_frames(frames)
    assert [int(tile.sum(axis=(0, 1)).argmax()) for tile in native] == [0, 1, 2]
    write_sheet(tmp_path / "sheet.png", [SheetRow("a ball", native, 0 * native)])
    image = np.asarray(Image.open(tmp_path / "sheet.png").convert("RGB"))
    centres = [tuple(int(v) for v in image[14 + 16, 24 + 48 * k + (6 if k > 2 else 0)]) for k in range(6)]
    assert centres == [(250, 0, 0), (0, 250, 0), (0, 0, 250), (0, 0, 0), (0, 0, 0), (0, 0, 0)]
