"""The stages one after the other on tiny models, resumed and repeated."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import WanPipeline

from app.jobs.train_shapes.__main__ import main
from app.jobs.train_shapes.checkpointing import rate_at


def stage(name: str, out: Path, *more: str) -> dict:
    return main([name, "--out", str(out), "--smoke", "--device", "cpu", *more])


def losses(out: Path, name: str) -> list[float]:
    return json.loads((out / f"{name}_report.json").read_text())["losses"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("trained")
    stage("vae", out)
    stage("denoiser", out)
    return out


def test_the_pipeline_loads_what_the_stages_wrote(trained: Path):
    pipeline = WanPipeline.from_pretrained(trained, dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    frames = pipeline(
        "a red ball moves left", height=32, width=32, num_frames=5, num_inference_steps=2, output_type="np"
    ).frames
    assert frames.shape == (1, 5, 32, 32, 3)
    assert np.isfinite(frames).all()


@pytest.mark.parametrize("name", ["vae", "denoiser"])
def test_the_same_seed_gives_the_same_losses(trained: Path, tmp_path: Path, name: str):
    if name == "denoiser":
        (tmp_path / "vae").symlink_to(trained / "vae")
    stage(name, tmp_path)
    # Not to the last digit: threads add in any order.
    assert losses(tmp_path, name) == pytest.approx(losses(trained, name), rel=1e-4)


def test_another_seed_gives_other_losses(trained: Path, tmp_path: Path):
    stage("vae", tmp_path, "--seed", "1")
    assert losses(tmp_path, "vae") != pytest.approx(losses(trained, "vae"), rel=1e-4)


def test_a_stopped_stage_goes_on_where_it_was(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Stopped in the third of four steps, after a save; the finished losses are those of the run without a stop."""
    from app.jobs.train_shapes import denoiser_training
    from app.jobs.train_shapes.pace import Pace

    (tmp_path / "vae").symlink_to(trained / "vae")
    monkeypatch.setattr(Pace, "saves", lambda pace: True)
    update = denoiser_training.Average.update

    def stop_at_two(average: object, step: int) -> None:
        if step == 2:
            raise KeyboardInterrupt
        update(average, step)

    monkeypatch.setattr(denoiser_training.Average, "update", stop_at_two)
    with pytest.raises(KeyboardInterrupt):
        stage("denoiser", tmp_path)
    monkeypatch.setattr(denoiser_training.Average, "update", update)
    stage("denoiser", tmp_path)
    assert losses(tmp_path, "denoiser") == pytest.approx(losses(trained, "denoiser"), rel=1e-4)


def test_the_denoiser_needs_an_autoencoder(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match=r"has no folder 'vae'; run the stage vae"):
        stage("denoiser", tmp_path)


def test_an_unfinished_folder_is_not_bundled(trained: Path, tmp_path: Path):
    with pytest.raises(FileNotFoundError, match=r"lacks sheet.png, evaluation.json"):
        stage("bundle", trained, "--to", str(tmp_path))


def test_steps_and_seconds_exclude_each_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        stage("vae", tmp_path, "--steps", "3", "--seconds", "5")
    assert "--steps and --seconds: both given" in capsys.readouterr().err


def test_the_rate_rises_and_falls():
    assert [rate_at(step, 100, 10) for step in (0, 9)] == [0.1, 1.0]
    assert rate_at(55, 100, 10) == pytest.approx(0.5)
    assert rate_at(100, 100, 10) == pytest.approx(0)
