"""A small profile and evidence about it, for the tests of what the two prove together."""

from __future__ import annotations

from typing import Any, Literal, Protocol

import pytest

from deployments.stage_cache.evidence import Evidence, TopologyResult
from deployments.stage_cache.gates import GateValues
from deployments.stage_cache.profile import Profile


class MakeProfile(Protocol):
    def __call__(self, profile_id: str = "small-v1") -> Profile: ...


class MakeEvidence(Protocol):
    def __call__(
        self,
        kind: Literal["calibration", "acceptance"],
        failing: str | None = None,
        videos: int = 36,
        **changes: Any,
    ) -> Evidence: ...


@pytest.fixture
def profile() -> MakeProfile:
    return _profile


@pytest.fixture
def evidence() -> MakeEvidence:
    return _evidence


_TOPOLOGIES = ("pp1-cfg1", "pp1-cfg2", "pp2-cfg1", "pp2-cfg2")


def _profile(profile_id: str = "small-v1") -> Profile:
    hold = {"predictor": {"kind": "hold"}}
    return Profile.model_validate(
        {
            "format": "wan-stage-cache/1",
            "profile_id": profile_id,
            "model": {
                "fingerprint": "ab" * 32,
                "dtype": "float32",
                "layers": 4,
                "heads": 2,
                "head_dim": 24,
                "in_channels": 16,
            },
            "request": {
                "width": 128,
                "height": 128,
                "num_frames": 17,
                "num_inference_steps": 50,
                "guidance_scale": [5.0, 5.0],
                "flow_shift": 3.0,
                "scheduler": "UniPCMultistepScheduler",
                "solver_order": 2,
                "timesteps_sha256": "0" * 64,
            },
            "limits": {},
            "policy": {"decision": "schedule", "plan": [12, 15]},
            "partitions": [
                {"stages": [{"stage": 0, "layers": [0, 4]} | hold]},
                {"stages": [{"stage": 0, "layers": [0, 2]} | hold, {"stage": 1, "layers": [2, 4]} | hold]},
            ],
            "cfg": [1, 2],
        }
    )


def _evidence(
    kind: Literal["calibration", "acceptance"], failing: str | None = None, videos: int = 36, **changes: Any
) -> Evidence:
    """All four topologies pass, but `failing` with a temporal error of .2."""
    base = Evidence(
        kind=kind,
        profile_sha256=_profile().digest,
        prompts_sha256=("1" if kind == "calibration" else "2") * 64,
        seeds=(1, 2) if kind == "calibration" else (3, 4, 5),
        topologies=tuple(
            TopologyResult(
                topology=name,
                gates=GateValues(
                    videos=videos,
                    mean_ssim=0.99,
                    min_video_ssim=0.97,
                    mean_temporal_error_ratio=0.2 if name == failing else 0.05,
                    latency_ratio=0.8,
                ),
            )
            for name in _TOPOLOGIES
        ),
        source_commit="c0ffee",
        environment_sha256="3" * 64,
        device="cpu",
        date="2026-11-30",
    )
    return base.model_copy(update=changes)
