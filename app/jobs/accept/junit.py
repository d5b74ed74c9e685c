"""A JUnit file of one topology: exactly the four gates, a failed one with its value and what was required."""

from __future__ import annotations

from collections.abc import Mapping
from xml.etree.ElementTree import Element, SubElement, indent, tostring

from deployments.stage_cache.gates import GATES, GateLimits, GateValues


def junit(topology: str, gates: GateValues, properties: Mapping[str, str]) -> bytes:
    """The file's bytes.  properties: of the suite; the number of videos is always among them."""
    failures = gates.failures()
    names = list(GateLimits.model_fields)
    counts = {"tests": str(len(names)), "failures": str(len(failures)), "errors": "0", "skipped": "0"}
    suite = Element("testsuite", {"name": f"step-cache-acceptance.{topology}", **counts})
    listed = SubElement(suite, "properties")
    for name, value in {"videos": str(gates.videos), **properties}.items():
        SubElement(listed, "property", name=name, value=value)
    for name in names:
        case = SubElement(suite, "testcase", classname=topology, name=name)
        if name in failures:
            SubElement(case, "failure", message=failures[name])
        else:
            SubElement(case, "system-out").text = f"{getattr(gates, name)!r}, bound {getattr(GATES, name)!r}"
    indent(suite)
    return b'<?xml version="1.0" encoding="utf-8"?>\n' + bytes(tostring(suite)) + b"\n"
