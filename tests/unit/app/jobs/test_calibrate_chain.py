"""One process that chains all stages: the bits of a gang, native and cached, and what it collects on the way."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from app.jobs.calibrate.candidate_run import RunCached
from app.jobs.calibrate.collect import CollectVideo, VideoRows
from app.jobs.calibrate.fits import Fits, fit_all, rows_of
from app.jobs.calibrate.studio import TEXTS, Studio, StudioSpec
from app.jobs.calibrate.sweep import SweepVideo, interpolated
from app.jobs.clip_settings import ClipSettings
from app.jobs.prompt_set import Video
from deployments.stage_cache.predictor import Linear
from deployments.stage_cache.skip_schedule import Schedule
from tests.checkpoints import write_wan_checkpoint
from tests.gangs import Ask, GangSpec, StepCacheSpec, run_gang

STEPS = 10
CLIP = ClipSettings(
    width=48,
    height=32,
    num_frames=5,
    num_inference_steps=STEPS,
    guidance_scale=5.0,
    flow_shift=3.0,
    max_sequence_length=32,
)
VIDEO = Video("a red ball", 7)
REUSE = (4, 6)


@pytest.fixture(scope="module")
def studio(tmp_path_factory: pytest.TempPathFactory) -> Studio:
    folder = write_wan_checkpoint(tmp_path_factory.mktemp("wan"), num_blocks=4)
    run = tmp_path_factory.mktemp("run")
    noise = torch.Generator().manual_seed(5)
    texts = {f"positive.{VIDEO.prompt}": torch.randn(1, 32, 32, generator=noise)}
    save_file(texts | {"negative": torch.randn(1, 32, 32, generator=noise)}, run / TEXTS)
    threads = torch.get_num_threads()
    yield Studio(StudioSpec(str(folder), None, "float32", False, CLIP, run), 0)
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def rows(studio: Studio) -> VideoRows:
    return CollectVideo(VIDEO)(studio)


@pytest.fixture(scope="module")
def fits(studio: Studio, rows: VideoRows) -> Fits:
    return fit_all([rows], studio.checkpoint, CLIP, "e")


def ask(studio: Studio, reuse: tuple[int, ...]) -> Ask:
    text = {"positive": studio._texts[f"positive.{VIDEO.prompt}"], "negative": studio._texts["negative"]}
    return Ask("job", text, CLIP.latent_shape(studio.checkpoint), STEPS, VIDEO.seed, reuse=reuse)


@pytest.mark.parametrize(("pp", "cfg"), [(1, 1), (2, 1), (2, 2)])
def test_latents_are_those_of_a_gang_bit_for_bit(
    studio: Studio, rows: VideoRows, tmp_path: Path, pp: int, cfg: int
) -> None:
    spec = GangSpec(studio.spec.checkpoint, pp, cfg, step_cache=StepCacheSpec())
    gang = run_gang(spec, [[ask(studio, ())]], tmp_path)["job"]
    assert torch.equal(studio.native(VIDEO)[1], gang)
    RunCached(VIDEO, Schedule(STEPS, REUSE), (Linear(),) * pp, ({},) * pp, keep=True)(studio)
    gang = run_gang(spec, [[ask(studio, REUSE)]], tmp_path)["job"]
    assert torch.equal(studio.cached(VIDEO, pp, Schedule(STEPS, REUSE)), gang)
    assert not torch.equal(gang, studio.native(VIDEO)[1])


def test_every_stage_of_both_splits_has_its_own_rows(rows: VideoRows) -> None:
    """Check 5: N steps give 2 (N - 1) transitions a stage, never 2 N - 1."""
    assert [(stage.pp, stage.stage) for stage in rows.stages] == [(1, 0), (2, 0), (2, 1)]
    for stage in rows.stages:
        assert len(stage.transitions) == 2 * (STEPS - 1)
        # Anchored at lags (1, 2), (1, 3) and (2, 3): from steps 2, 3 and 3 on.
        assert len(stage.anchored) == 2 * ((STEPS - 2) + 2 * (STEPS - 3))
    one, first, second = (stage.transitions for stage in rows.stages)
    assert one != first != second


def test_one_stage_has_the_residual_of_both_halves_together(studio: Studio, rows: VideoRows) -> None:
    """|r_i|^2 of the whole lies within the triangle of its halves: were one half left out, it would equal the other."""
    norms = {
        (stage.pp, stage.stage): {(row.branch, row.step): row.ii**0.5 for row in stage.anchored}
        for stage in rows.stages
    }
    for key, whole in norms[1, 0].items():
        first, second = norms[2, 0][key], norms[2, 1][key]
        assert abs(first - second) <= whole * (1 + 1e-6)
        assert whole <= (first + second) * (1 + 1e-6)
        assert whole not in (pytest.approx(first, rel=1e-3), pytest.approx(second, rel=1e-3))


def test_a_single_skip_is_the_cached_run_with_one_hit(studio: Studio, rows: VideoRows, fits: Fits) -> None:
    """Resuming from the state before the skip saves time and changes nothing."""
    step = 5
    predictor = fits.predictor("ls2", 1, 0, Schedule(STEPS))
    (skip,) = SweepVideo(VIDEO, (step,), predictor)(studio)
    whole = RunCached(VIDEO, Schedule(STEPS, (step,)), (predictor,), ({},))(studio)
    assert skip.temporal_error == whole.quality.temporal_error
    assert skip.latent_relative_l2 == whole.quality.latent_relative_l2
    assert skip.latent_relative_l2 > 0


def test_a_cached_run_counts_its_hits_by_stage_and_branch(studio: Studio, rows: VideoRows) -> None:
    run = RunCached(VIDEO, Schedule(STEPS, REUSE), (Linear(), Linear()), ({}, {}))(studio)
    counts = {(count.stage, count.branch): count.hits for count in run.hits}
    assert counts == {(stage, branch): 2 for stage in (0, 1) for branch in ("positive", "negative")}
    assert (len(run.hit_seconds), len(run.full_seconds)) == (2, STEPS - 2)


def test_an_empty_schedule_is_native(studio: Studio, rows: VideoRows) -> None:
    run = RunCached(VIDEO, Schedule(STEPS), (Linear(),), ({},))(studio)
    assert (run.quality.latent_max_abs, run.quality.ssim, run.quality.temporal_error) == (0.0, 1.0, 0.0)


def test_a_guard_that_trips_ends_the_reuse(studio: Studio, rows: VideoRows) -> None:
    """The check of step 3 is read at step 5 and holds from step 6 on, so of hits 4, 6 and 8 only 4 happens."""
    limits = ({("positive", 3): 1e-9},)
    run = RunCached(VIDEO, Schedule(STEPS, (4, 6, 8)), (Linear(),), limits)(studio)
    assert run.trips == 1
    assert {count.hits for count in run.hits} == {1}


def test_fits_have_a_row_for_every_anchor_pattern(fits: Fits, rows: VideoRows) -> None:
    predictor = fits.predictor("ls2", 2, 1, Schedule(STEPS, (4, 6)))
    assert predictor.covers("negative", 6, (5, 3))
    assert not predictor.covers("negative", 6, (5, 4))  # not this schedule's anchors
    assert fits.stage(2, 0).weights != fits.stage(2, 1).weights
    assert len(rows_of([rows, rows], 2, 1)[0]) == 4 * (STEPS - 1)


def test_between_swept_steps_the_error_is_interpolated_in_its_logarithm() -> None:
    found = interpolated({2: 1e-2, 4: 1e-4, 5: 1e-4})
    assert list(found) == [2, 3, 4, 5]
    assert np.allclose(list(found.values()), [1e-2, 1e-3, 1e-4, 1e-4], rtol=1e-12)
