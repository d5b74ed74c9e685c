"""The benchmark of worlds: what its rows are made of, that a difference is seen, and a whole run on the small model."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from app.jobs.bench_world.__main__ import compare, main
from app.jobs.bench_world.digests import digest
from app.jobs.bench_world.measurement import Measured
from app.jobs.bench_world.other_process import Found, Kind
from app.jobs.bench_world.table import Row, format_rows, rows
from app.jobs.world_options import size, start_image

HERE = {
    "open: prompt": [0.1],
    "open: image": [0.2],
    "open: chunk": [0.5],
    "open: frames": [0.3],
    "generate": [0.4] * 5 + [0.6] * 4,  # the window is full in the last four
    "decode": [0.2] * 9,
    "period": [0.7, 0.6, 0.8],
    "resume, kept": [0.9, 0.1, 0.2],
    "resume, journal": [1.6, 0.8, 0.8],
    "decoder warmed": [2.0],
    "journal stored": [0.01] * 8,
    "frames fetched": [0.02] * 8,
    "full hit, frames": [0.4],
    "full hit, decoded": [1.6],
}


def test_rows_are_medians_of_what_they_name() -> None:
    table = {row.name: row for row in rows(HERE)}
    values = {name: row.value for name, row in table.items()}
    assert values["first chunk of a session that is open"] == pytest.approx(0.8)
    assert values["session opened, and its first chunk"] == pytest.approx(1.1)
    assert values["cold chunk, window full"] == 0.6
    assert values["clean-pass replay of a chunk"] == pytest.approx(0.1)
    # 1.1 to open; seven more chunks: five of .4 and two of .6, each decoded in .2
    assert values["8 chunks cold, decoded one after another"] == pytest.approx(1.1 + 3.2 + 1.4)
    assert values["full hit: times faster than cold"] == pytest.approx(5.7 / 0.4)
    assert {name: row.reached for name, row in table.items() if row.aim} == {
        "first chunk of a session that is open": True,
        "session opened, and its first chunk": True,
        "steady period, decode overlapped on one device": False,
        "resume of 8 parked chunks, keys and values kept": True,
        "resume of 8 parked chunks, from the journal": True,
        "full hit: times faster than cold": True,
    }


def test_a_missed_aim_is_shown() -> None:
    text = format_rows([Row("fast", 2.0, 1.0), Row("ratio", 2.0, 1.0, at_least=True), Row("plain", 3.0)])
    assert [line.split() for line in text.splitlines()] == [
        ["fast", "2.000", "aim", "<=", "1", "MISSED"],
        ["ratio", "2.000", "aim", ">=", "1", "reached"],
        ["plain", "3.000"],
    ]


def found() -> tuple[Measured, dict[Kind, Found]]:
    chunks = [str(chunk) for chunk in range(10)]
    here = Measured(latents=chunks, frames=chunks, kv=chunks[5:8], equal={"own": True})
    return here, {
        "again": Found(latents=list(chunks), frames=list(chunks), after=chunks[8:], kv=chunks[5:8]),
        "cut": Found(latents=chunks[:6]),
    }


def test_equal_bits_are_seen_and_so_is_each_difference() -> None:
    here, others = found()
    assert all(compare(here, others).values())
    answers: list[tuple[Kind, str]] = [("again", name) for name in ("latents", "frames", "after", "kv")]
    for kind, name in [*answers, ("cut", "latents")]:
        here, others = found()
        values = getattr(others[kind], name)
        values[-1] = "other"
        assert list(compare(here, others).values()).count(False) == 1, (kind, name)
    here, others = found()
    here.kv[0] = others["again"].kv[0] = ""  # nothing kept is nothing proved
    assert not all(compare(here, others).values())
    assert not all(compare(replace(here, equal={"own": False}), found()[1]).values())


def test_digests_tell_bits_dtypes_and_shapes_apart() -> None:
    x = torch.zeros(2, 3)
    negative = x.clone()
    negative[0, 0] = -0.0
    assert len({digest(x), digest(negative), digest(x.bfloat16()), digest(x.view(3, 2))}) == 4
    assert digest(x.expand(2, 3)) == digest(x)


def test_sizes_are_read_and_wrong_ones_refused() -> None:
    assert size("464x832") == (464, 832)
    for text in ("464", "464x", "464x830", "0x16", "-16x16"):
        with pytest.raises(argparse.ArgumentTypeError, match="expected"):
            size(text)
    image = start_image(16, 32)
    assert (image.shape, image.dtype, image.unique().numel() > 100) == ((16, 32, 3), torch.uint8, True)


@pytest.mark.slow
def test_a_whole_run_on_the_small_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "report.json"
    arguments = ["--random", "small", "--device", "cpu", "--size", "16x32", "--window", "6", "--sink", "2"]
    assert (
        main([*arguments, "--scratch", str(tmp_path), "--out", str(out), "--profile", str(tmp_path / "profile")]) == 0
    )
    report = json.loads(out.read_text())
    assert len(report["equal"]) == 11
    assert all(report["equal"].values())
    assert all(row["value"] > 0 for row in report["rows"])
    assert "bit-equal  two stages on one device: latents" in capsys.readouterr().out
    assert "scaled_dot_product_attention" in (tmp_path / "profile").read_text()
