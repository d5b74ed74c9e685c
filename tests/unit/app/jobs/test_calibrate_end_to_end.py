"""The whole protocol on a small random checkpoint in the layout of Wan2.1-T2V-1.3B: every stage, every topology.

Random weights and a dozen steps pass no latency gate by right, so the honest end is `diagnostic_only` whenever a gate
fails, and acceptance refuses the profile: two videos are no calibration.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from app.jobs import compare_policies
from app.jobs.accept import __main__ as accept
from app.jobs.calibrate import __main__ as calibrate
from app.jobs.calibrate.settings import SettingsError
from app.jobs.freeze import main as freeze
from deployments.stage_cache.evidence import Evidence, Status
from deployments.stage_cache.frozen_profile import open_profile
from deployments.stage_cache.gates import GateValues
from deployments.stage_cache.profile import ProfileRefused
from tests.checkpoints import write_wan_checkpoint

pytestmark = pytest.mark.timeout(1800)  # some twenty processes, each importing torch, on a machine others may use

PROMPTS = Path("configs/prompts")
STEPS = 12


def command(checkpoint: Path, run: Path, **changes: str) -> list[str]:
    options = {
        "out": str(run),
        "profile-id": "random-v1",
        "checkpoint": str(checkpoint),
        "dtype": "float32",
        "workers": "2",
        "decoder-threads": "1",
        "width": "48",
        "height": "32",
        "frames": "5",
        "steps": str(STEPS),
        "max-sequence-length": "16",
        "prompts": str(PROMPTS / "natural-calibration.yaml"),
        "first-prompts": "2",
        "first-seeds": "1",
        "warmup": "3",
        "cooldown": "2",
        "sweep-videos": "1",
        "sweep-stride": "2",
        "masks": "3",
        "swap-videos": "1",
        "swap-trials": "2",
        "timing-pairs": "1",
        "source-commit": "c0ffee",
    } | changes
    return ["--hits", "3"] + [part for name, value in options.items() for part in (f"--{name}", value)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_wan_checkpoint(tmp_path_factory.mktemp("wan"), num_blocks=2)


@pytest.fixture(scope="module")
def run(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("runs") / "run"
    calibrate.main(command(checkpoint, run))
    return run


def test_calibration_ends_in_a_profile_whose_status_follows_from_its_gates(run: Path, tmp_path: Path) -> None:
    freeze([str(run), "--to", str(tmp_path / "p"), "--acceptance-prompts", str(PROMPTS / "natural-acceptance.yaml")])
    opened = open_profile(tmp_path / "p", allow_unqualified=True)
    assert opened.profile.topologies == ("pp1-cfg1", "pp1-cfg2", "pp2-cfg1", "pp2-cfg2")
    assert opened.calibration is not None
    failures = opened.calibration.failures(opened.profile)
    assert opened.status is (Status.DIAGNOSTIC_ONLY if failures else Status.CALIBRATED)
    with pytest.raises(ProfileRefused, match=r"diagnostic_only|fewer than 48"):
        accept.main([str(tmp_path / "p"), "--out", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


def test_a_gate_that_fails_makes_it_diagnostic_only(run: Path, tmp_path: Path) -> None:
    """On a quiet machine the small model may pass; a ratio above .90 in one topology decides."""
    profile = run / "profile"
    evidence = Evidence.model_validate_json((profile / "calibration.json").read_text())
    first, *rest = evidence.topologies
    gates = GateValues.model_validate(first.gates.model_dump() | {"latency_ratio": 0.91})
    failed = evidence.model_copy(update={"topologies": (first.model_copy(update={"gates": gates}), *rest)})
    kept = (profile / "calibration.json").read_text()
    (profile / "calibration.json").write_text(failed.model_dump_json())
    try:
        prompts = str(PROMPTS / "natural-acceptance.yaml")
        freeze([str(run), "--to", str(tmp_path / "p"), "--acceptance-prompts", prompts])
    finally:
        (profile / "calibration.json").write_text(kept)
    assert open_profile(tmp_path / "p", allow_unqualified=True).status is Status.DIAGNOSTIC_ONLY


def test_every_candidate_is_recorded_and_plots_are_there(run: Path) -> None:
    lines = [json.loads(line) for line in (run / "candidates.jsonl").read_text().splitlines()]
    purposes = [line["purpose"] for line in lines]
    assert purposes.count("additive check") == 3
    assert purposes.count("search") >= 1
    assert purposes.count("finalist") == 2  # both splits
    assert json.loads((run / "selection.json").read_text())["candidates"] == len(lines)
    for line in lines:
        assert len(line["candidate"]["hits"]) == 2 * line["candidate"]["pp"]
        assert {count["hits"] for count in line["candidate"]["hits"]} == {3 * len(line["videos"])}
    for name in ("sensitivity.png", "quality.png"):
        assert (run / "profile" / name).read_bytes().startswith(b"\x89PNG")


def test_timed_requests_have_the_bits_of_the_single_process(run: Path) -> None:
    timed = [json.loads(line) for line in (run / "timed.jsonl").read_text().splitlines()]
    assert [row["topology"] for row in timed] == ["pp1-cfg1", "pp1-cfg2", "pp2-cfg1", "pp2-cfg2"]
    for row in timed:
        assert row["different_bits"] == []
        assert set(row["hits"].values()) == {3}
        assert len(row["hits"]) == 2 * int(row["topology"][2])


def test_the_fits_use_every_pair(run: Path) -> None:
    """Check 6: videos x transitions x branches."""
    fits = json.loads((run / "fits.json").read_text())
    assert {stage["signal"]["pairs"] for stage in fits["stages"]} == {2 * (STEPS - 1) * 2}


def test_a_run_that_is_there_is_not_measured_again(run: Path, checkpoint: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in run.glob("*.json*")}
    calibrate.main(["search", *command(checkpoint, run)])
    assert {path: path.stat().st_mtime_ns for path in run.glob("*.json*")} == before
    with pytest.raises(SettingsError, match="masks"):
        calibrate.main(command(checkpoint, run, masks="4"))


def test_policies_are_compared_at_equal_hits(run: Path, capsys: pytest.CaptureFixture) -> None:
    compare_policies.main([str(run), "--hits", "3", "--videos", "1", "--workers", "1"])
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| 3 |")]
    assert [row.split("|")[2].strip() for row in rows] == ["teacache", "magcache", "hold", "scaled", "linear", "ls2"]
