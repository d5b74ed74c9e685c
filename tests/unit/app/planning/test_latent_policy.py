"""What the driver knows of the latent cache: whose work is alike, and which latents are worth leaving."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

from app.config import VideoModel
from app.driver.job_state import VideoParams
from app.planning import latent_policy
from app.planning.latent_policy import LatentPolicy, open_latent_policy
from cache_actors.latent_config import ApproximateConfig, LatentCacheConfig
from cache_actors.similarity_map import Scope
from deployments.wan.checkpoint import open_checkpoint
from deployments.wan.solver_spec import SolverSpec
from tests.checkpoints import write_wan_checkpoint
from tests.latents import similarity_map

PARAMS = VideoParams(
    model="tiny",
    prompt="  a red&amp;blue   ball ",
    negative_prompt="",
    width=64,
    height=48,
    num_frames=9,
    fps=8,
    num_inference_steps=4,
    guidance_scale=5.0,
    guidance_scale_2=None,
    flow_shift=3.0,
    seed=1,
    max_sequence_length=16,
    tenant="team",
)
SOLVER = SolverSpec("UniPCMultistepScheduler", {"use_flow_sigmas": True}, 4, 3.0, None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_wan_checkpoint(tmp_path_factory.mktemp("wan"))


def opened(folder: Path, config: dict[str, Any] | None = None, accelerators: tuple[str, ...] = (), **model: Any):
    served = VideoModel.model_validate({"name": "tiny", "checkpoint": str(folder), "dtype": "float32", **model})
    return open_latent_policy(
        LatentCacheConfig.model_validate(config or {}),
        served,
        open_checkpoint(str(folder)),
        "a" * 64,
        step_profile=None,
        threads=1,
        accelerators=accelerators,
    )


def test_an_identity_is_the_cleaned_request_with_the_solver_s_own_numbers(folder: Path) -> None:
    policy: LatentPolicy = pickle.loads(pickle.dumps(opened(folder)))
    found = policy.identity(PARAMS, SOLVER, (1, 16, 3, 6, 8), ())
    assert (found.prompt, found.tenant, found.weights) == ("a red&blue ball", "team", "a" * 64)
    assert len(found.timesteps) == 4
    assert len(found.sigmas) == 5
    assert found.timesteps == tuple(SOLVER.build("cpu").timesteps.tolist())


@pytest.mark.parametrize(
    "other", [{"topology": {"pp": 2}}, {"compile": "blocks"}, {"decoder": {"dtype": "bfloat16"}}], ids=str
)
def test_what_changes_bits_or_files_changes_a_digest(folder: Path, other: dict[str, Any]) -> None:
    one, two = opened(folder).served, opened(folder, **other).served
    assert (one.numerics != two.numerics, one.decoder != two.decoder) == ("decoder" not in other, "decoder" in other)


def test_level_1_needs_one_type_of_gpu(folder: Path) -> None:
    kinds, on_gpu = ("accelerator_type:A", "accelerator_type:B"), {"ranks": {"gpus": 1}}
    with pytest.raises(ValueError, match=r"exact_states: true, but the cluster has GPUs of several types"):
        opened(folder, None, kinds, **on_gpu)
    assert opened(folder, {"exact_states": False}, kinds, **on_gpu).served.numerics
    assert opened(folder, None, kinds).served.numerics  # ranks on CPUs


def test_shadow_runs_need_scikit_image(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "map.json").write_text(similarity_map().model_dump_json())
    level_2 = {"similarity_map": str(tmp_path / "map.json"), "shadow_fraction": 0.5}
    assert opened(folder, {"approximate": level_2}).similarity_map == similarity_map()
    monkeypatch.setattr(latent_policy, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"shadow_fraction: got 0.5, but comparing needs scikit-image"):
        opened(folder, {"approximate": level_2})


def test_latents_are_left_only_where_somebody_could_use_them(folder: Path) -> None:
    plain = opened(folder)
    identity = plain.identity(PARAMS, SOLVER, (1, 16, 3, 6, 8), ())
    assert plain.donor_steps(identity) == ()
    fitting = similarity_map(scope=Scope.model_validate({name: getattr(identity, name) for name in Scope.model_fields}))

    def steps(served: Any, **changes: Any) -> tuple[int, ...]:
        level_2 = ApproximateConfig(similarity_map="m", experimental=changes.pop("experimental", False))
        return LatentPolicy(LatentCacheConfig(approximate=level_2, **changes), plain.served, served).donor_steps(
            identity
        )

    assert steps(fitting) == (3, 6)
    assert steps(fitting, mode="read_only") == ()
    assert steps(similarity_map()) == ()  # measured on other requests
    assert steps(similarity_map(), experimental=True) == (3, 6)
