"""A calibrated profile's folder as `python -m app.jobs.calibrate` leaves it, made up for the smallest checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from app.jobs.calibrate.fits import identity_of
from app.jobs.calibrate.settings import CalibrationSettings
from app.jobs.clip_settings import ClipSettings
from app.jobs.prompt_set import Prompt, PromptSet
from deployments.stage_cache.evidence import Evidence, TopologyResult
from deployments.stage_cache.gates import GateValues
from deployments.stage_cache.predictor import Linear
from deployments.stage_cache.profile import Profile
from deployments.stage_cache.profile_parts import Partition, ScheduleDecision, StageProfile
from deployments.stage_cache.skip_schedule import SkipLimits
from deployments.wan.checkpoint import fingerprint, open_checkpoint
from tests.checkpoints import write_wan_checkpoint

CLIP = ClipSettings(
    width=48,
    height=32,
    num_frames=5,
    num_inference_steps=8,
    guidance_scale=5.0,
    flow_shift=3.0,
    max_sequence_length=16,
)
LIMITS = SkipLimits(warmup_steps=3, cooldown_steps=1, max_consecutive=1, min_anchors=2)
WriteRun = Callable[..., Path]


@pytest.fixture(scope="session")
def checkpoint_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_wan_checkpoint(tmp_path_factory.mktemp("wan"), num_blocks=2)


@pytest.fixture
def write_run(tmp_path: Path, checkpoint_folder: Path) -> WriteRun:
    def write(name: str = "run", videos: int = 48, temporal_error: float = 0.05) -> Path:
        return _write_run(tmp_path / name, checkpoint_folder, videos, temporal_error)

    return write


def prompt_set(purpose: str, prompts: int, seeds: tuple[int, ...], word: str) -> PromptSet:
    numbers = ("red", "green", "blue", "yellow", "small", "large", "still", "left", "right", "up", "down", "gray")
    texts = [Prompt(kind="static", text=f"a {word} {number} circle") for number in numbers[:prompts]]
    return PromptSet(format="worldstage-prompts/1", purpose=purpose, seeds=seeds, prompts=tuple(texts))


def _write_run(run: Path, checkpoint_folder: Path, videos: int, temporal_error: float) -> Path:
    checkpoint = open_checkpoint(str(checkpoint_folder))
    prompts = prompt_set("calibration", 4, (1, 2), "square")
    profile = Profile(
        format="wan-stage-cache/1",
        profile_id="smallest-v1",
        model=identity_of(checkpoint, fingerprint(checkpoint), "float32", str(checkpoint_folder), None),
        request=CLIP.request_shape(checkpoint),
        limits=LIMITS,
        policy=ScheduleDecision(plan=(3, 5)),
        partitions=tuple(
            Partition(
                stages=tuple(
                    StageProfile(stage=k, layers=(k * 2 // pp, (k + 1) * 2 // pp), fit=None, predictor=Linear())
                    for k in range(pp)
                )
            )
            for pp in (1, 2)
        ),
        cfg=(1, 2),
    )
    gates = GateValues(
        videos=videos,
        mean_ssim=0.99,
        min_video_ssim=0.97,
        mean_temporal_error_ratio=temporal_error,
        latency_ratio=0.8,
    )
    evidence = Evidence(
        kind="calibration",
        profile_sha256=profile.digest,
        prompts_sha256=prompts.digest,
        seeds=prompts.seeds,
        topologies=tuple(TopologyResult(topology=name, gates=gates, junit_sha256=None) for name in profile.topologies),
        source_commit="c0ffee",
        environment_sha256="3" * 64,
        device="CPU",
        date="2026-11-30",
    )
    settings = CalibrationSettings(
        profile_id="smallest-v1",
        checkpoint=str(checkpoint_folder),
        revision=None,
        dtype="float32",
        on_gpu=False,
        clip=CLIP,
        prompts=prompts,
        signal="e",
        predictor="linear",
        limits=LIMITS,
        hits=(2,),
        sweep_videos=1,
        sweep_stride=1,
        masks=3,
        swap_videos=1,
        swap_trials=1,
        timing_pairs=1,
    )
    folder = run / "profile"
    folder.mkdir(parents=True)
    (folder / "profile.yaml").write_text(profile.to_yaml())
    (folder / "calibration.json").write_text(evidence.model_dump_json())
    (folder / "calibration-prompts.yaml").write_text(prompts.to_yaml())
    (folder / "settings.json").write_text(settings.model_dump_json())
    (folder / "candidates.jsonl").write_text("{}\n{}\n")
    return run
