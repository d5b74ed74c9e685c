"""Which steps a request reuses: by its shape and settings, never by what it shows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from app.config import CacheConfig, VideoModel
from app.driver.job_state import VideoParams
from app.planning.step_cache_policy import StepCachePolicy, open_policy
from app.planning.video_plan import video_plan
from deployments.plan import BRANCHES
from deployments.stage_cache.evidence import Status
from deployments.stage_cache.profile import Profile, ProfileRefused
from deployments.stage_cache.timestep_signal import timesteps_sha256
from deployments.stage_cache.variant import UnsupportedVariant
from deployments.wan.checkpoint import WanCheckpoint, fingerprint, open_checkpoint
from deployments.wan.solver_spec import SolverSpec
from tests.checkpoints import write_wan_checkpoint

STEPS = 12
PLAN = (5, 7)
FIT = {"signal": "e", "coefficients": [0, 0, 0, 0, 0.02], "input_range": [0, 10], "pairs": 98, "rmse": 0.01, "r2": 0.9}


def solver(checkpoint: WanCheckpoint) -> SolverSpec:
    return SolverSpec(checkpoint.scheduler, checkpoint.scheduler_config, STEPS, 3.0, None)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> WanCheckpoint:
    return open_checkpoint(str(write_wan_checkpoint(tmp_path_factory.mktemp("wan"), num_blocks=2)))


def write_profile(folder: Path, checkpoint: WanCheckpoint, policy: dict[str, object]) -> None:
    """A draft for all four topologies: linear prediction, P(d) = .02 in every stage."""
    timesteps = solver(checkpoint).build(torch.device("cpu")).timesteps.tolist()
    stage = {"fit": FIT, "predictor": {"kind": "linear"}}
    halves = [{"stage": k, "layers": [k, k + 1]} | stage for k in range(2)]
    profile = Profile.model_validate(
        {
            "format": "wan-stage-cache/1",
            "profile_id": "small-v1",
            "model": {
                "fingerprint": fingerprint(checkpoint),
                "dtype": "float32",
                "layers": 2,
                "heads": 2,
                "head_dim": 24,
                "in_channels": 16,
            },
            "request": {
                "width": 48,
                "height": 32,
                "num_frames": 5,
                "num_inference_steps": STEPS,
                "guidance_scale": [5.0, 5.0],
                "flow_shift": 3.0,
                "scheduler": "UniPCMultistepScheduler",
                "solver_order": 2,
                "timesteps_sha256": timesteps_sha256(timesteps),
            },
            "limits": {"warmup_steps": 4, "cooldown_steps": 2},
            "policy": policy,
            "partitions": [{"stages": [{"stage": 0, "layers": [0, 2]} | stage]}, {"stages": halves}],
            "cfg": [1, 2],
        }
    )
    folder.mkdir(exist_ok=True)
    (folder / "profile.yaml").write_text(profile.to_yaml())


def served(checkpoint: WanCheckpoint, folder: Path, **topology: int) -> StepCachePolicy:
    cache = CacheConfig(wan_profile=str(folder), allow_unqualified=True)
    model = VideoModel.model_validate(
        {"name": "small", "checkpoint": str(checkpoint.folder), "dtype": "float32", "topology": topology}
    )
    return open_policy(cache, model, checkpoint, fingerprint(checkpoint))


def request(**changes: object) -> VideoParams:
    base = {
        "model": "small",
        "prompt": "a red circle",
        "negative_prompt": "",
        "width": 48,
        "height": 32,
        "num_frames": 5,
        "fps": 16,
        "num_inference_steps": STEPS,
        "guidance_scale": 5.0,
        "guidance_scale_2": None,
        "flow_shift": 3.0,
        "seed": 0,
        "max_sequence_length": 32,
    }
    return VideoParams.model_validate(base | changes)


@pytest.mark.parametrize(
    "policy",
    [
        {"decision": "schedule", "plan": list(PLAN)},
        {"decision": "teacache_timestep", "threshold": 0.05, "plan": None},
    ],
    ids=["frozen list", "derived from the timesteps"],
)
def test_prompts_seeds_branches_and_topologies_share_one_schedule(
    checkpoint: WanCheckpoint, tmp_path: Path, policy: dict[str, object]
) -> None:
    write_profile(tmp_path, checkpoint, policy)
    decisions = set()
    for topology in ({"pp": 1, "cfg": 1}, {"pp": 1, "cfg": 2}, {"pp": 2, "cfg": 1}, {"pp": 2, "cfg": 2}):
        opened = served(checkpoint, tmp_path, **topology)
        assert opened.status is Status.DRAFT
        for prompt in ("a red circle", "a small blue square moving left"):
            for seed in (0, 7):
                decision = opened.decide(request(prompt=prompt, seed=seed), solver(checkpoint), 0)
                assert decision.native is None
                decisions.add(decision.reuse)
        plan = video_plan(
            stages=topology["pp"],
            chains=topology["cfg"],
            guidance_scale=5.0,
            experts=[0] * STEPS,
            reuse=decision.reuse,
        )
        for branch in BRANCHES:
            for stage in range(topology["pp"]):
                ops = [node for node in plan.nodes if (node.branch, node.stage) == (branch, stage)]
                assert tuple(node.step for node in ops if node.op == "reuse") == decision.reuse
    (reuse,) = decisions
    # Derived: .02 a step, so 4 reuses (.02), 5 would be a second hit in a row and clears the sum, 6 and 8 reuse.
    assert reuse == (PLAN if policy["decision"] == "schedule" else (4, 6, 8))


def test_a_request_that_reuses_nothing_says_why(checkpoint: WanCheckpoint, tmp_path: Path) -> None:
    write_profile(tmp_path, checkpoint, {"decision": "schedule", "plan": list(PLAN)})
    opened = served(checkpoint, tmp_path)
    for changes, start, code in (
        ({"step_cache": "off"}, 0, "off"),
        ({"width": 64}, 0, "width"),
        ({"num_frames": 9}, 0, "num_frames"),
        ({}, 6, "resumed"),
    ):
        decision = opened.decide(request(**changes), solver(checkpoint), start)
        assert decision.reuse == ()
        assert decision.native is not None
        assert decision.native.code == code
    assert opened.decide(request(), solver(checkpoint), 4).reuse == (7,)  # 5 has one anchor after a resume at 4


def test_models_and_topologies_no_profile_holds_for_are_refused_at_start(
    checkpoint: WanCheckpoint, tmp_path: Path
) -> None:
    write_profile(tmp_path / "profile", checkpoint, {"decision": "schedule", "plan": list(PLAN)})
    two = open_checkpoint(str(write_wan_checkpoint(tmp_path / "two", num_blocks=2, experts=2)))
    with pytest.raises(UnsupportedVariant, match=r"two experts.*single-expert"):
        served(two, tmp_path / "profile")
    three = open_checkpoint(str(write_wan_checkpoint(tmp_path / "three", num_blocks=3)))
    with pytest.raises(ProfileRefused, match=r"3 stages.*pp2-cfg2"):
        served(three, tmp_path / "profile", pp=3)
