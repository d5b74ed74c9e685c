"""Checks a Serve config file before anything is started: ``python -m app.validate CONFIG ...``.

Ray Serve ignores a misspelt key almost everywhere in its config file, and fills in the default instead.  Here every
key of the file is compared with the fields of Serve's own models, at any depth, and the ``args`` of an application
built by `app.builder:build` with `app.config.Worldstage`.  Values are checked by the same models.  The application is
not built and torch not loaded: whether a checkpoint exists, and fits, is found out at the start.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection, Iterator, Mapping
from copy import deepcopy
from difflib import get_close_matches
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml
from pydantic import AliasChoices, BaseModel, ValidationError
from pydantic.fields import FieldInfo
from ray.runtime_env import RuntimeEnv
from ray.serve.schema import ServeDeploySchema

from app.config import Worldstage

BUILDER = "app.builder:build"


class _UniqueKeys(yaml.SafeLoader):
    """YAML itself would keep the last of two equal keys and drop the first without a word."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
        for (key_node, _), key in zip(node.value, keys, strict=False):
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is there twice", key_node.start_mark)
        return dict(super().construct_mapping(node, deep))


def read_config(path: Path) -> dict[str, Any]:
    """The file's content.  Raises `ValueError` for bad YAML, a key written twice, and a file that is no mapping."""
    try:
        config = yaml.load(path.read_text(encoding="utf-8"), Loader=_UniqueKeys)
    except yaml.YAMLError as error:
        raise ValueError(f"not readable as YAML: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"got {type(config).__name__}, expected a mapping with the key `applications`")
    return config


def find_problems(config: dict[str, Any]) -> list[str]:
    """Everything wrong with a Serve config, one line each, beginning with the path of the key; empty if it is fine."""
    found = [*_unknown_keys(config, ServeDeploySchema, ""), *_wrong_values(config, ServeDeploySchema, "")]
    options = config.get("http_options")
    if not (isinstance(options, dict) and "host" in options):
        found.append("http_options.host: missing; Serve would take 0.0.0.0, every network; write 127.0.0.1 or 0.0.0.0")
    applications = config.get("applications")
    for index, application in enumerate(applications if isinstance(applications, list) else []):
        if isinstance(application, dict) and application.get("import_path") == BUILDER:
            path, args = f"applications[{index}].args", application.get("args", {})
            found += [*_unknown_keys(args, Worldstage, path), *_wrong_values(args, Worldstage, path)]
    return list(dict.fromkeys(found))  # Serve's validators may report one fault twice


def _unknown_keys(value: object, annotation: Any, path: str) -> Iterator[str]:
    """Keys inside `value` that `annotation`, a type as pydantic reads it, does not know."""
    types = list(_alternatives(annotation))
    if isinstance(value, list):
        for element in (get_args(kind)[0] for kind in types if get_origin(kind) in (list, tuple) and get_args(kind)):
            for index, item in enumerate(value):
                yield from _unknown_keys(item, element, _join(path, index))
    elif isinstance(value, dict):
        for element in (get_args(kind)[1] for kind in types if get_origin(kind) is dict and get_args(kind)):
            for key, item in value.items():
                yield from _unknown_keys(item, element, _join(path, key))
        models = [kind for kind in types if isinstance(kind, type) and issubclass(kind, BaseModel)]
        # Of a union of models, those whose literal fields (the discriminator) agree with the value.
        fitting = [model for model in models if _literals_agree(value, model)] or models
        fields = {name: field for model in fitting for name, field in _fields_by_key(model).items()}
        for key, item in value.items() if fields else ():
            if key not in fields:
                yield f"{_join(path, key)}: unknown; {_suggestion(key, fields)}"
            elif key == "runtime_env" and isinstance(item, dict):  # a plain dict in Serve's models
                for name in item.keys() - RuntimeEnv.known_fields:
                    known = [field for field in RuntimeEnv.known_fields if not field.startswith("_")]
                    yield f"{_join(path, key)}.{name}: unknown; {_suggestion(name, known)}"
            else:
                yield from _unknown_keys(item, fields[key].annotation, _join(path, key))


def _alternatives(annotation: Any) -> Iterator[Any]:
    """The types a union offers, without ``Annotated``; the type itself if it is no union."""
    origin = get_origin(annotation)
    if origin is Annotated:
        yield from _alternatives(get_args(annotation)[0])
    elif origin in (Union, UnionType):
        for alternative in get_args(annotation):
            yield from _alternatives(alternative)
    else:
        yield annotation


def _literals_agree(value: Mapping[str, object], model: type[BaseModel]) -> bool:
    literals = {k: get_args(f.annotation) for k, f in model.model_fields.items() if get_origin(f.annotation) is Literal}
    return all(value[key] in allowed for key, allowed in literals.items() if key in value)


def _fields_by_key(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """Fields under every key that sets them: their aliases, and their name unless an alias replaces it."""
    keys: dict[str, FieldInfo] = {}
    for name, field in model.model_fields.items():
        alias = field.validation_alias or field.alias
        choices = alias.choices if isinstance(alias, AliasChoices) else [alias]
        keys |= {choice: field for choice in choices if isinstance(choice, str)}
        if alias is None or model.model_config.get("populate_by_name") or model.model_config.get("validate_by_name"):
            keys[name] = field
    return keys


def _suggestion(key: object, known: Collection[str]) -> str:
    close = get_close_matches(str(key), known, n=1)
    return f"did you mean {close[0]}?" if close else f"known here: {', '.join(sorted(known))}"


def _wrong_values(value: object, model: type[BaseModel], path: str) -> Iterator[str]:
    """What `model` says against `value`, unknown keys left out."""
    try:
        model.model_validate(deepcopy(value))  # Serve's validators write into what they are given
    except ValidationError as error:
        for fault in error.errors(include_url=False):
            kind, got = fault["type"], fault["input"]
            # Pydantic also calls a list too short whose items were wrong: those are reported already.
            if kind == "extra_forbidden" or (kind == "too_short" and len(got) >= fault["ctx"]["min_length"]):
                continue
            shown = "" if kind in ("missing", "value_error") or isinstance(got, dict) else f"; got {got!r}"
            yield f"{_locate(fault['loc'], kind, value, path)}: {fault['msg'].removeprefix('Value error, ')}{shown}"


def _locate(loc: tuple[int | str, ...], kind: str, value: Any, path: str) -> str:
    """Pydantic's location as a path into the file: it also names the members of unions, which are no keys."""
    for depth, part in enumerate(loc):
        if isinstance(value, dict | list) and (isinstance(part, int) or part in value):
            path, value = _join(path, part), value[part]  # type: ignore[index]  # an int for a list
        elif kind == "missing" and depth == len(loc) - 1:
            path = _join(path, part)
    return path or "the file"


def _join(path: str, part: object) -> str:
    if isinstance(part, int):
        return f"{path}[{part}]"
    return f"{path}.{part}" if path else str(part)


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0 if every file is fine, 1 otherwise."""
    parser = argparse.ArgumentParser(prog="python -m app.validate", description="Check Serve config files.")
    parser.add_argument("configs", nargs="+", type=Path, metavar="CONFIG")
    status = 0
    for path in parser.parse_args(arguments).configs:
        try:
            problems = find_problems(read_config(path))
        except (OSError, ValueError) as error:
            problems = [str(error)]
        for problem in problems:
            print(f"{path}: {problem}", file=sys.stderr)
        if problems:
            status = 1
        else:
            print(f"{path}: fine")
    return status


if __name__ == "__main__":
    sys.exit(main())
