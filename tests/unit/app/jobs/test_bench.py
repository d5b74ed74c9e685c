"""The benchmark: its arithmetic on hand-made times, and one real round on a tiny model."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from app.jobs.bench.__main__ import main
from app.jobs.bench.bench_rank import RankReport
from app.jobs.bench.bench_request import BenchRequest
from app.jobs.bench.comparison import compare, format_rows, run_order
from app.jobs.bench.contestants import Timed
from app.jobs.bench.random_checkpoint import SIZES, write_random_checkpoint
from app.jobs.bench.reuse import reused_steps
from app.jobs.bench.topologies import (
    LoadResult,
    TopologyResult,
    TopologySetup,
    format_topologies,
    latents_agree,
    parse_topologies,
    topology_result,
)
from app.jobs.bench.video_shape import VideoShape
from deployments.wan.checkpoint import WanCheckpoint, open_checkpoint

REQUEST = BenchRequest(VideoShape(64, 32, 5), steps=4, seed=0, guidance_scale=5.0, max_sequence_length=8)


def test_a_shape_knows_its_latents_and_tokens():
    shape = VideoShape.parse("832x480x81")
    assert (str(shape), shape.latents(16), shape.tokens) == ("832x480x81", (1, 16, 21, 60, 104), 32760)
    assert VideoShape.parse("512x512x17").tokens == 5120


@pytest.mark.parametrize("text", ["832x480", "830x480x81", "832x480x80", "0x16x1", "832x480x81x1", "axbxc"])
def test_a_shape_that_no_model_takes_is_refused(text: str):
    with pytest.raises(ValueError, match="shape: got"):
        VideoShape.parse(text)


def test_contestants_take_turns_so_that_a_drift_hits_all_alike():
    assert run_order(2, 1) == [0, 1, 1, 0]
    assert run_order(3, 2) == [0, 1, 2, 2, 1, 0, 0, 1, 2, 2, 1, 0]
    # A machine that slows down by the same amount with every run costs each contestant the same in total.
    order = run_order(3, 2)
    assert len({sum(at for at, who in enumerate(order) if who == contestant) for contestant in range(3)}) == 1


class Scripted:
    """A contestant with given times and latents."""

    def __init__(self, name: str, denoise: list[float], latents: list[float]) -> None:
        self.name, self._denoise, self._latents = name, iter(denoise), iter(latents)

    def run(self, request: BenchRequest) -> Timed:
        phases = {"text": 0.1, "denoise": next(self._denoise), "decode": 0.2, "overhead": 0.0}
        return Timed(phases, torch.tensor([next(self._latents)]))

    def close(self) -> None:
        pass


def test_medians_ratios_and_differences_leave_the_warm_up_out():
    base = Scripted("base", [90.0, 0.7, 1.7], [5.0, 1.0, 1.0])
    ours = Scripted("ours", [80.0, 0.3, 0.5], [9.0, 1.5, 1.0])
    rows = compare([base, ours], REQUEST, 1, lambda line: None)
    assert [row.total.median for row in rows] == pytest.approx([1.5, 0.7])  # (1.0 + 2.0) / 2, (0.6 + 0.8) / 2
    assert [row.total.least for row in rows] == pytest.approx([1.0, 0.6])
    assert [row.ratio for row in rows] == pytest.approx([1.0, 0.7 / 1.5])
    assert [row.denoise_ratio for row in rows] == pytest.approx([1.0, 0.4 / 1.2])
    assert [row.latents_difference for row in rows] == [0.0, 0.5]
    assert [row.repeatable for row in rows] == [True, False]
    assert "5.0e-01!" in format_rows(REQUEST, rows)


def test_topologies_are_named():
    assert parse_topologies("all") == ((1, 1), (1, 2), (2, 1), (2, 2))
    assert parse_topologies("pp3cfg1,pp1cfg2") == ((3, 1), (1, 2))
    with pytest.raises(ValueError, match="got \\['pp0cfg1'\\], expected all or of"):
        parse_topologies("pp1cfg1,pp0cfg1")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> WanCheckpoint:
    folder = write_random_checkpoint(
        tmp_path_factory.mktemp("tiny"), SIZES["tiny"], full_vae=False, dtype=torch.float32, device=torch.device("cpu")
    )
    return open_checkpoint(str(folder))


def setup(checkpoint: WanCheckpoint, *requests: BenchRequest) -> TopologySetup:
    return TopologySetup(str(checkpoint.folder), requests, (1, 2), "float32", False, False, 1)


def test_two_stages_are_summed_up_and_simulated(checkpoint: WanCheckpoint):
    # Second shape of two: requests 1, 2 warm the first up, 3 is its load 1, 4 and 5 its load 2; 6, 7 warm up; 8; 9, 10.
    # Alone, four steps of two branches: rank 0 computes 8 x 0.1 s, rank 1 the same and 4 x 0.05 s of solving, and each
    # waits 0.2 s inside its steps.
    first = {8: {"run": (4, 1.0), "stage": (8, 0.8), "wait": (4, 0.2)}}
    last = {8: {"run": (4, 1.2), "stage": (8, 0.8), "wait": (8, 0.2)}}
    for number in (9, 10):
        first[number], last[number] = first[8], last[8]
    reports = [RankReport(first, {REQUEST.shape.tokens: 0.01}), RankReport(last)]
    loads = [
        {"in_flight": 1, "seconds": 2.0, "latents": ["a"]},
        {"in_flight": 2, "seconds": 2.5, "latents": ["a", "b"]},
    ]
    timings = {"loads": loads, "reused_s": 1.5}
    other = replace(REQUEST, shape=VideoShape(32, 32, 5))
    result = topology_result(setup(checkpoint, other, REQUEST), checkpoint, REQUEST, 2, 1, reports, timings)
    assert result.stage_s == pytest.approx((0.1, 0.1))
    assert result.solve_s == pytest.approx(0.05)
    assert result.loads[0].busy == pytest.approx((0.4, 0.5))  # 0.8 of 2.0 s, 1.0 of 2.0 s
    assert result.loads[1].busy == pytest.approx((0.64, 0.8))
    # A step alone: c0, then c1 beside u0, then u1 and the solver, a hop to rank 1 and one back: 0.3 + 0.05 + 0.02; the
    # makespan ends before the last hop back.
    assert result.loads[0].simulated_s == pytest.approx(4 * 0.37 - 0.01)
    assert result.loads[1].simulated_s < 2 * result.loads[0].simulated_s
    assert "pp2cfg1  with reused steps: 1.500 s, 0.750 of it" in format_topologies([result])


def test_latents_must_agree_over_topologies_and_loads():
    def result(*latents: tuple[str, ...]) -> TopologyResult:
        loads = tuple(LoadResult(len(x), 1.0, (1.0,), 1.0, x) for x in latents)
        return TopologyResult(1, 1, None, "64x32x5", 4, None, (0.1,), 0.0, loads, (None,), ())

    assert latents_agree([result(("a",), ("a", "b")), result(("a",), ("a", "b"))])
    assert not latents_agree([result(("a",), ("a", "b")), result(("a",), ("a", "c"))])
    assert not latents_agree([result(("a",), ("c", "b"))])


def test_reused_steps_are_spread_and_never_two_in_a_row():
    assert reused_steps(3, 1) == (2,)
    assert reused_steps(50, 0) == ()
    for count in range(1, 18):
        steps = reused_steps(50, count)
        assert len(steps) == count
        assert min(b - a for a, b in itertools.pairwise((0, *steps))) >= 2
    with pytest.raises(ValueError, match="expected at most 18"):
        reused_steps(50, 19)


def test_our_side_gives_the_bits_of_wan_pipeline(checkpoint: WanCheckpoint, tmp_path: Path):
    out = tmp_path / "out.json"
    options = ["--checkpoint", str(checkpoint.folder), "--shapes", "64x32x5", "--steps", "3", "--dtype", "float32"]
    options += ["--max-sequence-length", "8", "--device", "cpu", "--reuse", "1", "--out", str(out)]
    assert main(options) == 0
    measured = json.loads(out.read_text())
    (comparison,) = measured["comparison"]
    base, ours, reusing = comparison["contestants"]
    assert base["name"] == "diffusers WanPipeline"
    assert ours["latents_difference"] == 0
    assert ours["repeatable"]
    assert reusing["latents_difference"] > 0  # a step was predicted, not computed
    assert reusing["repeatable"]
    assert ours["phases"]["denoise"]["median_s"] > 0
    assert measured["machine"]["torch"] == torch.__version__


@pytest.mark.slow
def test_two_ranks_give_the_latents_of_one(checkpoint: WanCheckpoint, tmp_path: Path):
    out = tmp_path / "out.json"
    options = ["--checkpoint", str(checkpoint.folder), "--shapes", "64x32x5", "--steps", "3", "--dtype", "float32"]
    options += ["--max-sequence-length", "8", "--device", "cpu", "--topologies", "pp1cfg1,pp2cfg1", "--loads", "1", "2"]
    assert main([*options, "--threads", "1", "--out", str(out)]) == 0  # 1 if bits differed
    one, two = json.loads(out.read_text())["topologies"][0]
    assert [len(load["latents"]) for load in two["loads"]] == [1, 2]
    assert two["loads"][0]["latents"] == one["loads"][0]["latents"]
    assert two["hop_s"] > 0
    assert all(0 < share <= 1 for load in two["loads"] for share in load["busy"])
