"""Pydantic's findings in this API's words: field, value, what is allowed, nearest valid value."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from app.api.errors import InvalidValue, UnknownField, shown

Model = TypeVar("Model", bound=BaseModel)


def validated(model: type[Model], fields: Mapping[str, Any]) -> Model:
    """`fields` as `model`.  Raises InvalidValue or UnknownField."""
    known = tuple(model.model_fields)
    unknown = [name for name in fields if name not in known]
    if unknown:  # looked for here: pydantic cannot report a name that is no valid UTF-8
        raise UnknownField("; ".join(unknown_field(name, known) for name in unknown[:5]), unknown[0])
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        raise error_of(error.errors(include_url=False)) from None


def error_of(findings: Iterable[Mapping[str, Any]]) -> InvalidValue:
    """One error for all findings: its `param` is the first field, its message tells every one."""
    found = [_sentence(finding) for finding in findings]
    return InvalidValue("; ".join(text for _, text in found), found[0][0])


def unknown_field(name: str, known: Sequence[str]) -> str:
    """The sentence for a field that does not exist."""
    close = difflib.get_close_matches(name[:80], known, n=1)
    hint = f"did you mean {close[0]}?" if close else f"allowed: {', '.join(known) or 'none'}"
    return f"{shown(name)[1:-1]}: unknown field; {hint}"


def _sentence(finding: Mapping[str, Any]) -> tuple[str, str]:
    name = ".".join(str(item) for item in finding["loc"])
    if finding["type"] == "missing":
        return name, f"{name}: required"
    expected = finding["msg"].removeprefix("Value error, ").replace("Input should be", "expected")
    limits = finding.get("ctx", {})
    nearest = limits.get("ge", limits.get("le"))
    near = "" if nearest is None else f"; nearest valid: {nearest}"
    return name, f"{name}: got {shown(finding['input'])}, {expected}{near}"
