"""`app.validate` against hand-made files: every key Serve would ignore is found, and nothing else is called wrong."""

from __future__ import annotations

import subprocess
import sys
from copy import deepcopy
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml
from pydantic import AliasChoices, BaseModel, Field
from ray.serve.schema import ServeDeploySchema

from app import validate

ROOT = Path(__file__).parents[3]
GOOD: dict[str, Any] = {
    "proxy_location": "HeadOnly",
    "http_options": {"host": "127.0.0.1", "port": 8000},
    "applications": [
        {
            "name": "worldstage",
            "route_prefix": "/",
            "import_path": "app.builder:build",
            "runtime_env": {"env_vars": {"ANY_NAME": "1"}},
            "deployments": [
                {
                    "name": "Gang",
                    "num_replicas": 2,
                    "user_config": {"free": {"form": 1}},
                    "ray_actor_options": {"num_cpus": 1, "resources": {"any_name": 1}},
                    "gang_scheduling_config": {"gang_size": 2},
                    "request_router_config": {"request_router_kwargs": {"any_name": 1}},
                }
            ],
            "args": {"models": [{"name": "m", "checkpoint": "c", "topology": {"pp": 2, "split": [3, 5]}}]},
        }
    ],
}


def at(config: Any, *path: str | int) -> Any:
    for part in path:
        config = config[part]
    return config


@pytest.mark.parametrize(
    ("path", "key", "expected"),
    [
        ((), "aplications", "aplications: unknown; did you mean applications?"),
        (("http_options",), "prt", "http_options.prt: unknown; did you mean port?"),
        (("applications", 0), "arg", "applications[0].arg: unknown; did you mean args?"),
        (
            ("applications", 0, "runtime_env"),
            "env_var",
            "applications[0].runtime_env.env_var: unknown; did you mean env_vars?",
        ),
        (
            ("applications", 0, "deployments", 0),
            "num_replica",
            "applications[0].deployments[0].num_replica: unknown; did you mean num_replicas?",
        ),
        (
            ("applications", 0, "deployments", 0, "ray_actor_options"),
            "num_cpu",
            "applications[0].deployments[0].ray_actor_options.num_cpu: unknown; did you mean num_cpus?",
        ),
        (
            ("applications", 0, "deployments", 0, "gang_scheduling_config"),
            "gang_sice",
            "applications[0].deployments[0].gang_scheduling_config.gang_sice: unknown; did you mean gang_size?",
        ),
        (
            ("applications", 0, "args"),
            "job",
            "applications[0].args.job: unknown; did you mean jobs?",
        ),
        (
            ("applications", 0, "args", "models", 0),
            "topolgy",
            "applications[0].args.models[0].topolgy: unknown; did you mean topology?",
        ),
        (("http_options",), "xyz", "http_options.xyz: unknown; known here: host, keep_alive_timeout_s, port,"),
        (
            ("applications", 0, "args", "models", 0, "topology"),
            "splt",
            "applications[0].args.models[0].topology.splt: unknown; did you mean split?",
        ),
    ],
)
def test_an_unknown_key_is_the_only_problem_named(path: tuple[str | int, ...], key: str, expected: str) -> None:
    config = deepcopy(GOOD)
    at(config, *path)[key] = {}
    (problem,) = validate.find_problems(config)
    assert problem.startswith(expected)


def test_serve_itself_takes_the_misspelt_keys() -> None:
    """The reason for the module; when this fails, Serve has become strict and the walk over its models can go."""
    config = deepcopy(GOOD)
    config["aplications"] = config["http_options"]["prt"] = config["applications"][0]["arg"] = {}
    ServeDeploySchema.model_validate(config)


def test_a_config_without_fault_has_no_problem_and_is_left_as_it_was() -> None:
    config = deepcopy(GOOD)
    assert validate.find_problems(config) == []
    assert config == GOOD  # Serve's own validators replace parts of a dict by models


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        (("http_options", "port"), "abc", ["http_options.port: Input should be a valid integer", "got 'abc'"]),
        (("applications", 0, "args", "models", 0, "topology", "pp"), 9, ["args.models[0].topology.pp: ", "4; got 9"]),
        (("applications", 0, "args", "models", 0, "topology", "split"), [8], [".topology: split: got 1 stages [8]"]),
        (("applications", 0, "args", "models"), [], ["args: models: got none"]),
        (("applications", 0, "args", "models", 0), {"name": "m"}, ["args.models[0].checkpoint: Field required"]),
        (("applications", 0, "args"), "text", ["applications[0].args: ", "got 'text'"]),
        (("applications", 0, "deployments", 0, "num_replicas"), 3, ["applications[0].deployments[0]", "gang_size"]),
        (("applications",), 5, ["applications: ", "got 5"]),
    ],
)
def test_a_wrong_value_is_named_with_its_path(path: tuple[str | int, ...], value: object, expected: list[str]) -> None:
    config = deepcopy(GOOD)
    at(config, *path[:-1])[path[-1]] = value
    problems = validate.find_problems(config)
    assert any(all(part in problem for part in expected) for problem in problems), problems


def test_one_wrong_item_does_not_make_its_list_too_short() -> None:
    config = deepcopy(GOOD)
    config["applications"][0]["args"]["models"][0]["dtype"] = "fp32"
    (problem,) = validate.find_problems(config)
    assert problem.startswith("applications[0].args.models[0].dtype: ")


def test_args_of_another_builder_are_not_judged() -> None:
    config = deepcopy(GOOD)
    config["applications"][0] |= {"import_path": "other:build", "args": {"anything": 1}}
    assert validate.find_problems(config) == []


def test_a_missing_host_is_refused() -> None:
    config = deepcopy(GOOD)
    del config["http_options"]["host"]
    (problem,) = validate.find_problems(config)
    assert problem.startswith("http_options.host: missing; Serve would take 0.0.0.0")


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int = 9


class Dog(BaseModel):
    kind: Literal["dog"]
    tricks: int = Field(0, validation_alias=AliasChoices("tricks", "stunts"))


class Pets(BaseModel):
    pet: Cat | Dog = Field(discriminator="kind")
    by_name: dict[str, Cat | None] = {}
    others: tuple[Dog, ...] = ()


def test_unions_dicts_and_aliases_are_followed() -> None:
    value = {
        "pet": {"kind": "dog", "lives": 3, "stunts": 1},  # lives belongs to the other member of the union
        "by_name": {"tom": {"kind": "cat", "live": 1}, "none": None},
        "others": [{"kind": "dog"}, {"kind": "dog", "trick": 1}],
    }
    assert list(validate._unknown_keys(value, Pets, "")) == [
        "pet.lives: unknown; known here: kind, stunts, tricks",
        "by_name.tom.live: unknown; did you mean lives?",
        "others[1].trick: unknown; did you mean tricks?",
    ]


@pytest.mark.parametrize("config", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.name)
def test_every_config_of_the_repository_is_fine(config: Path) -> None:
    assert validate.find_problems(validate.read_config(config)) == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: 1\nb: {c: 1, c: 2}", "key 'c' is there twice"),
        ("a: [", "not readable as YAML"),
        ("- a", "got list, expected a mapping"),
        ("", "got NoneType, expected a mapping"),
    ],
)
def test_an_unreadable_file_says_why(tmp_path: Path, text: str, expected: str) -> None:
    (tmp_path / "x.yaml").write_text(text)
    with pytest.raises(ValueError, match=expected):
        validate.read_config(tmp_path / "x.yaml")


def test_merge_keys_may_override(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text("a: &a {x: 1}\nb: {<<: *a, x: 2}")
    assert validate.read_config(tmp_path / "x.yaml")["b"] == {"x": 2}


def test_the_command_prints_every_problem_and_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, bad = tmp_path / "good.yaml", tmp_path / "bad.yaml"
    good.write_text(yaml.safe_dump(GOOD))
    bad.write_text(yaml.safe_dump(GOOD | {"http_option": {}, "loggin_config": {}}))
    assert validate.main([str(good)]) == 0
    assert capsys.readouterr().out == f"{good}: fine\n"
    assert validate.main([str(good), str(bad), str(tmp_path / "none.yaml")]) == 1
    errors = capsys.readouterr().err
    assert f"{bad}: http_option: unknown; did you mean http_options?" in errors
    assert f"{bad}: loggin_config: unknown; did you mean logging_config?" in errors
    assert "No such file" in errors


def test_torch_is_not_loaded() -> None:
    """It would make a check of a few lines of YAML wait for seconds."""
    code = "import sys, app.validate; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60).returncode == 0
