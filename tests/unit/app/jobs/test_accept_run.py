"""A whole acceptance of a made-up calibration on the smallest checkpoint: 36 pairs, four topologies, one shot."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING
from xml.etree import ElementTree

import pytest

from app.jobs.accept import __main__ as accept
from app.jobs.freeze import freeze_run
from app.jobs.prompt_set import PromptSet
from deployments.stage_cache.frozen_profile import check_manifest, open_profile
from deployments.stage_cache.profile import ProfileRefused

if TYPE_CHECKING:
    from conftest import WriteRun

pytestmark = pytest.mark.timeout(1800)  # eleven processes, each importing torch, on a machine others may use
TOPOLOGIES = ("pp1-cfg1", "pp1-cfg2", "pp2-cfg1", "pp2-cfg2")
COLOURS = ("red", "green", "blue", "yellow", "black", "gray", "small", "large", "still", "up", "down", "left")
UNSEEN = PromptSet.model_validate(
    {
        "format": "worldstage-prompts/1",
        "purpose": "acceptance",
        "seeds": [11, 12, 13],
        "prompts": [{"kind": "static", "text": f"a {colour} triangle"} for colour in COLOURS],
    }
)


def test_one_shot_records_everything(write_run: WriteRun, tmp_path: Path) -> None:
    folder, out = tmp_path / "profiles" / "smallest", tmp_path / "out"
    freeze_run(write_run() / "profile", folder, UNSEEN)
    command = [str(folder), "--out", str(out), "--workers", "2", "--timing-pairs", "1", "--decoder-threads", "1"]
    command += ["--source-commit", "c0ffee"]
    assert accept.main([*command, "--topologies", "pp1-cfg1"]) == 0
    assert not (folder / "acceptance.json").exists()  # three topologies are missing

    status = accept.main(command)
    opened = open_profile(folder, allow_unqualified=True)
    check_manifest(folder)  # the record changes no frozen byte
    assert opened.acceptance is not None
    failures = opened.acceptance.failures(opened.profile)
    assert status == int(bool(failures))
    assert opened.status.value == ("calibrated" if failures else "qualified")
    assert tuple(result.topology for result in opened.acceptance.topologies) == TOPOLOGIES
    assert {result.gates.videos for result in opened.acceptance.topologies} == {36}
    assert opened.acceptance.prompts_sha256 == UNSEEN.digest
    for result in opened.acceptance.topologies:
        content = (out / f"junit-{result.topology}.xml").read_bytes()
        assert hashlib.sha256(content).hexdigest() == result.junit_sha256
        assert len(list(ElementTree.fromstring(content).iter("testcase"))) == 4
    one, two = ([r.gates for r in opened.acceptance.topologies if r.topology.startswith(pp)] for pp in ("pp1", "pp2"))
    assert one[0].mean_ssim == one[1].mean_ssim
    assert two[0].mean_ssim == two[1].mean_ssim

    detail = json.loads((out / "acceptance-detail.json").read_text())
    for topology in TOPOLOGIES:
        assert len(detail[topology]["videos"]) == 36
        assert detail[topology]["different_bits"] == []
        assert set(detail[topology]["reused"].values()) == {2 * 36}  # two hits a video, in every stage and branch
    assert sorted(path.name for path in out.glob("sheet-*.png")) == [
        f"sheet-pp{pp}-{number}.png" for pp in (1, 2) for number in (1, 2, 3)
    ]
    with pytest.raises(ProfileRefused, match="one shot"):
        accept.main(command)
