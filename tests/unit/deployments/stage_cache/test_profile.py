"""What a profile may say, and when it is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from deployments.plan import BRANCHES
from deployments.stage_cache.profile import Profile, ProfileRefused, ServedModel
from deployments.stage_cache.skip_schedule import Schedule

STEPS = 12
PLAN = [5, 7]
ZEROS = "0" * 64


def rows(weights: tuple[float, float] = (1.5, -0.5)) -> list[dict[str, Any]]:
    """Step 5 after (4, 3); step 7 over the hit at 5, and after two full steps as a resumed run has them."""
    keys = [(5, [4, 3]), (7, [6, 4]), (7, [6, 5])]
    return [
        {"branch": branch, "step": step, "anchors": anchors, "weights": list(weights)}
        for branch in BRANCHES
        for step, anchors in keys
    ]


def stage(number: int, layers: tuple[int, int], **changes: Any) -> dict[str, Any]:
    return {"stage": number, "layers": list(layers), "predictor": {"kind": "ls2", "table": rows()}} | changes


def fit(low: float = 0.0, high: float = 1.0, **changes: Any) -> dict[str, Any]:
    """P(d) = .02."""
    return {
        "signal": "e",
        "coefficients": [0, 0, 0, 0, 0.02],
        "input_range": [low, high],
        "pairs": 98,
        "rmse": 0.01,
        "r2": 0.9,
    } | changes


def document() -> dict[str, Any]:
    return {
        "format": "wan-stage-cache/1",
        "profile_id": "small-v1",
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
            "num_inference_steps": STEPS,
            "guidance_scale": [4.0, 6.0],
            "flow_shift": 3.0,
            "scheduler": "UniPCMultistepScheduler",
            "solver_order": 2,
            "timesteps_sha256": ZEROS,
        },
        "limits": {"warmup_steps": 4, "cooldown_steps": 2},
        "policy": {"decision": "schedule", "plan": PLAN},
        "partitions": [{"stages": [stage(0, (0, 4))]}, {"stages": [stage(0, (0, 2)), stage(1, (2, 4))]}],
        "cfg": [1, 2],
    }


def served(**changes: Any) -> ServedModel:
    base = ServedModel(
        repo=None,
        revision=None,
        fingerprint="ab" * 32,
        dtype="float32",
        layers=4,
        heads=2,
        head_dim=24,
        in_channels=16,
        split=(2, 2),
        cfg=1,
        scheduler="UniPCMultistepScheduler",
        solver_order=2,
    )
    return replace(base, **changes)


@dataclass(frozen=True)
class Request:
    width: int = 128
    height: int = 128
    num_frames: int = 17
    num_inference_steps: int = STEPS
    guidance_scale: float = 5.0
    flow_shift: float = 3.0


def load(change: Callable[[dict[str, Any]], object] = lambda _: None) -> Profile:
    data = document()
    change(data)
    return Profile.model_validate(data)


def set_at(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    """A change of one field, "partitions.1.stages.0.layers" for instance."""

    def change(data: dict[str, Any]) -> None:
        *parents, last = path.split(".")
        node: Any = data
        for key in parents:
            node = node[int(key) if isinstance(node, list) else key]
        node[int(last) if isinstance(node, list) else last] = value

    return change


def test_a_profile_loads_and_names_its_topologies() -> None:
    profile = load()
    assert profile.topologies == ("pp1-cfg1", "pp1-cfg2", "pp2-cfg1", "pp2-cfg2")
    assert profile.partition((2, 2)).stages[1].layers == (2, 4)
    assert profile.anchors == 2


def test_yaml_and_back_keeps_the_digest() -> None:
    profile = load(set_at("partitions.0.stages.0.predictor.table.0.weights", [1.0 + 2**-50, -1e-300]))
    assert Profile.from_yaml(profile.to_yaml()) == profile
    assert Profile.from_yaml(profile.to_yaml()).digest == profile.digest
    assert Profile.from_yaml(yaml.safe_dump(yaml.safe_load(profile.to_yaml()))).digest == profile.digest  # reordered
    assert load().digest != profile.digest


def paths_of(node: Any, prefix: str = "") -> list[str]:
    """Every mapping of a document."""
    if isinstance(node, dict):
        return [prefix, *(p for k, v in node.items() for p in paths_of(v, f"{prefix}{k}."))]
    if isinstance(node, list):
        return [p for i, v in enumerate(node) for p in paths_of(v, f"{prefix}{i}.")]
    return []


@pytest.mark.parametrize("path", [p for p in paths_of(document()) if "table.1" not in p])
def test_an_unknown_field_is_refused_at_every_depth(path: str) -> None:
    with pytest.raises(ValidationError, match="Extra inputs are not permitted"):
        load(set_at(f"{path}typo", 1))


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("format", "wan-stage-cache/2", "wan-stage-cache/1"),
        ("model.dtype", "float16", "bfloat16"),
        ("model.fingerprint", None, "nothing pins the weights"),
        ("model.repo", "Wan-AI/Wan2.1-T2V-1.3B-Diffusers", "repo and revision belong together"),
        ("request.guidance_scale", [0.5, 6.0], "expected 1 < smallest"),
        ("policy.plan", [3, 7], "step 3 of 12 is outside"),
        ("policy.plan", [5, 10], "step 10 of 12 is outside"),
        ("policy.plan", [5, 6], "hit number 2 in a row"),
        ("policy.plan", [5, 8], "no weights for step 8 with anchors"),
        ("limits.min_anchors", 1, "the predictors need 2"),
        ("cfg", [1, 3], "Input should be 1 or 2"),
        ("partitions.1.stages.0.layers", [0, 1], "expected stage 1 with layers from 1"),
        ("partitions.0.stages.0.layers", [0, 3], "do not add up to model.layers = 4"),
        ("partitions.1.stages", [], "at least 1 item"),
        ("partitions.1", {"stages": [stage(0, (0, 4))]}, "one for each number of stages"),
        ("partitions.0.stages.0.error_limits", [{"branch": "positive", "step": 4, "limit": 0.1}], "without `guard`"),
        ("partitions.0.stages.0.fit", fit(coefficients=[0, 0, 0, 1]), "coefficients"),
        ("partitions.0.stages.0.fit", fit(coefficients=[0, 0, 0, 0, float("nan")]), "finite number"),
        ("partitions.0.stages.0.fit", fit(coefficients=[0, 0, 0, 0, 1, 2]), "coefficients"),
    ],
)
def test_a_wrong_profile_is_refused(path: str, value: Any, words: str) -> None:
    """Checks 4, 7, 13: refused at start, in words that name the field."""
    with pytest.raises(ValidationError, match=words):
        load(set_at(path, value))


def test_swapped_stages_are_refused() -> None:
    """Check 7."""
    with pytest.raises(ValidationError, match="stages missing or swapped"):
        load(lambda data: data["partitions"][1]["stages"].reverse())


def teacache(data: dict[str, Any], threshold: float = 0.05, plan: list[int] | None = None) -> None:
    data["policy"] = {"decision": "teacache_timestep", "threshold": threshold, "plan": plan}
    for partition in data["partitions"]:
        for one in partition["stages"]:
            one |= {"fit": fit(), "predictor": {"kind": "linear"}}


def test_missing_coefficients_have_no_default() -> None:
    """Check 4."""

    def change(data: dict[str, Any]) -> None:
        teacache(data)
        data["partitions"][1]["stages"][1]["fit"] = None

    with pytest.raises(ValidationError, match=r"\(pp, stage\) \[\(2, 1\)\].*no qualified default"):
        load(change)


def test_stages_watch_one_signal() -> None:
    def change(data: dict[str, Any]) -> None:
        teacache(data)
        data["partitions"][1]["stages"][1]["fit"] = fit(signal="e0")

    with pytest.raises(ValidationError, match="different signals"):
        load(change)


def test_an_explicit_plan_is_the_schedule() -> None:
    assert load().planned(None).schedule == Schedule(STEPS, (5, 7))


def test_a_derived_plan_is_the_same_in_every_topology() -> None:
    """P = .02 and threshold .05: step 4 reuses (.02), 5 would be a second hit in a row and clears, 6 and 8 reuse."""
    planned = load(teacache).planned([0.1] * (STEPS - 1))
    assert planned.schedule == Schedule(STEPS, (4, 6, 8))

    def strict(data: dict[str, Any]) -> None:
        teacache(data)
        data["partitions"][1]["stages"][1]["fit"] = fit(coefficients=[0, 0, 0, 0, 0.06])

    assert load(strict).planned([0.1] * (STEPS - 1)).schedule == Schedule(STEPS)  # one stage of one partition objects


def test_a_derived_plan_has_to_be_the_frozen_one() -> None:
    assert load(lambda d: teacache(d, plan=[4, 6, 8])).planned([0.1] * 11).schedule.reuse == (4, 6, 8)
    with pytest.raises(ProfileRefused, match=r"the server derives \[4, 6, 8\], small-v1 has \[4, 6\]"):
        load(lambda d: teacache(d, plan=[4, 6])).planned([0.1] * 11)


def test_a_derived_plan_without_weights_is_refused() -> None:
    def change(data: dict[str, Any]) -> None:
        teacache(data)
        data["partitions"][0]["stages"][0]["predictor"] = {"kind": "ls2", "table": rows()}

    with pytest.raises(ProfileRefused, match="no weights for step 4 with anchors"):
        load(change).planned([0.1] * 11)


def test_changes_are_required_and_counted() -> None:
    for changes in (None, [0.1] * 10):
        with pytest.raises(ProfileRefused, match="small-v1 needs 11"):
            load(teacache).planned(changes)


def test_the_range_guard_computes_or_refuses() -> None:
    """Check 12: a derived plan loses the step and counts it; a frozen list that reuses there is refused at load."""
    changes = [0.1] * 11
    changes[6 - 1] = 1.5
    planned = load(teacache).planned(changes)
    assert planned.schedule.reuse == (4, 7, 9)
    assert planned.out_of_range == (6,)
    explicit = load(set_at("partitions.1.stages.0.fit", fit()))
    assert explicit.planned(changes).schedule.reuse == (5, 7)
    changes[7 - 1] = 1.5
    with pytest.raises(ProfileRefused, match=r"steps \[7\] reuse outside the calibrated input range"):
        explicit.planned(changes)


def test_a_resumed_run_reuses_what_it_has_anchors_for() -> None:
    profile = load()
    schedule = profile.planned(None).schedule
    assert profile.resumed(schedule, 0) == schedule
    assert profile.resumed(schedule, 3) == schedule  # 3 and 4 are full
    assert profile.resumed(schedule, 4).reuse == (7,)  # 5 has one anchor; then 7 follows 6 and 5, and has their weights
    assert profile.resumed(schedule, 6).reuse == ()


def test_a_resumed_run_drops_hits_without_weights() -> None:
    def change(data: dict[str, Any]) -> None:
        for partition in data["partitions"]:
            for one in partition["stages"]:
                table = one["predictor"]["table"]
                one["predictor"]["table"] = [row for row in table if row["anchors"] != [6, 5]]

    profile = load(change)
    assert profile.resumed(profile.planned(None).schedule, 4).reuse == ()


def test_the_server_has_to_be_the_measured_one() -> None:
    profile = load()
    for split in ((4,), (2, 2)):
        for cfg in (1, 2):
            profile.check_served(served(split=split, cfg=cfg))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"fingerprint": "cd" * 32}, "fingerprint: got cdcd"),
        ({"dtype": "bfloat16"}, "dtype: got bfloat16, expected float32"),
        ({"layers": 6, "split": (3, 3)}, "layers: got 6"),
        ({"in_channels": 36}, "in_channels: got 36"),
        ({"split": (1, 1, 2)}, r"\(3 stages\), expected one of \[\(4,\), \(2, 2\)\]"),
        ({"split": (1, 3)}, "split: got"),
        ({"cfg": 3}, r"cfg: got 3, expected one of \[1, 2\]"),
        ({"scheduler": "FlowMatchEulerDiscreteScheduler"}, "scheduler: got FlowMatch"),
        ({"solver_order": 3}, "solver_order: got 3"),
    ],
)
def test_another_server_is_refused(changes: dict[str, Any], words: str) -> None:
    """Check 4: PP 3, CFG 3, other dtype, weights, partition or solver, with what is supported."""
    with pytest.raises(ProfileRefused, match=f"{words}.*pp2-cfg2") as refused:
        load().check_served(served(**changes))
    assert isinstance(refused.value, ValueError)


def test_a_revision_pins_as_well() -> None:
    profile = load(
        lambda d: d["model"].update(repo="Wan-AI/Wan2.1-T2V-1.3B-Diffusers", revision="0" * 40, fingerprint=None)
    )
    profile.check_served(served(repo="Wan-AI/Wan2.1-T2V-1.3B-Diffusers", revision="0" * 40, fingerprint="cd" * 32))
    with pytest.raises(ProfileRefused, match="revision: got None"):
        profile.check_served(served(repo="Wan-AI/Wan2.1-T2V-1.3B-Diffusers"))


def test_a_request_that_fits() -> None:
    for guidance in (4.0, 5.0, 6.0):
        assert load().fits(Request(guidance_scale=guidance), ZEROS) is None


@pytest.mark.parametrize(
    ("request_", "digest", "code", "words"),
    [
        (Request(width=256), ZEROS, "width", "got 256, profile small-v1 holds for 128"),
        (Request(height=144), ZEROS, "height", "144"),
        (Request(num_frames=21), ZEROS, "num_frames", "21"),
        (Request(num_inference_steps=50), ZEROS, "num_inference_steps", "50"),
        (Request(flow_shift=5.0), ZEROS, "flow_shift", "5.0"),
        (Request(guidance_scale=6.5), ZEROS, "guidance_scale", "4.0 to 6.0"),
        (Request(guidance_scale=1.0), ZEROS, "guidance_off", "without guidance"),
        (Request(), "1" * 64, "timesteps", "111111111111"),
    ],
)
def test_a_request_outside_the_profile_runs_native_and_says_why(
    request_: Request, digest: str, code: str, words: str
) -> None:
    """Check 22: another resolution or frame count is never cached under this profile."""
    reason = load().fits(request_, digest)
    assert reason is not None
    assert reason.code == code
    assert words in reason.message


def test_the_jobs_own_request_type_fits() -> None:
    """`app.driver.job_state.VideoParams` is what the driver will ask about."""
    from app.driver.job_state import VideoParams

    params = VideoParams(
        model="demo",
        prompt="a red circle",
        negative_prompt="",
        width=128,
        height=128,
        num_frames=17,
        fps=16,
        num_inference_steps=STEPS,
        guidance_scale=5.0,
        guidance_scale_2=None,
        flow_shift=3.0,
        seed=0,
        max_sequence_length=512,
    )
    assert load().fits(params, ZEROS) is None


def test_guard_limits_are_the_calibrated_ones_times_the_factor() -> None:
    def change(data: dict[str, Any]) -> None:
        data["guard"] = {"factor": 2.0}
        data["partitions"][0]["stages"][0]["error_limits"] = [{"branch": "negative", "step": 4, "limit": 0.25}]

    profile = load(change)
    assert profile.error_limits(profile.partition((4,)).stages[0]) == {("negative", 4): 0.5}
    assert profile.error_limits(profile.partition((2, 2)).stages[0]) == {}
    assert load().error_limits(load().partition((4,)).stages[0]) == {}


def test_a_threshold_of_zero_is_native() -> None:
    """Check 27."""
    assert load(lambda d: teacache(d, threshold=0.0)).planned([0.1] * 11).schedule.reuse == ()


def test_one_anchor_predictors_may_start_earlier() -> None:
    def change(data: dict[str, Any]) -> None:
        data["limits"] = {"warmup_steps": 1, "cooldown_steps": 1, "max_consecutive": 3, "min_anchors": 1}
        data["policy"]["plan"] = [1, 2, 3]
        for partition in data["partitions"]:
            for one in partition["stages"]:
                one["predictor"] = {"kind": "hold"}

    assert load(change).planned(None).schedule.reuse == (1, 2, 3)
