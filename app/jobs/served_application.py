"""The application of a config file for a job: the one that answers at the file's address, else one for the job alone.

A job that finds the application running uses it and leaves it running.  Otherwise it starts it, in the Ray cluster that
the job belongs to or in one of its own, and takes it down at the end, whatever the end.
"""

from __future__ import annotations

import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
from ray import serve

from app import validate
from app.config import Worldstage
from app.launch import Target

READY_TIMEOUT_S = 1800.0
"""Longest start: tens of gigabytes are loaded and compiled."""
PROBE_S = 0.5


class ApplicationError(RuntimeError):
    """The application is not the one of the config, or cannot be started; the message says why."""


def read_application(config: Path) -> dict[str, Any]:
    """The content of a config file that has one application of worldstage's.  Raises ApplicationError."""
    try:
        content = validate.read_config(config)
        problems = validate.find_problems(content)
    except (OSError, ValueError) as error:
        raise ApplicationError(f"{config}: {error}") from error
    if problems:
        raise ApplicationError("\n".join(f"{config}: {problem}" for problem in problems))
    paths = [application["import_path"] for application in content["applications"]]
    if paths != [validate.BUILDER]:
        raise ApplicationError(f"{config}: applications: got {paths}, expected one, of {validate.BUILDER}")
    return content


@contextmanager
def served(content: Mapping[str, Any], tell: Callable[[str], None]) -> Iterator[str]:
    """The base address, such as http://127.0.0.1:8000, of the ready application.  Raises ApplicationError.

    content: as `read_application` gives it.  tell: hears whose application it is.
    """
    target = Target.of(dict(content))
    running = _models_at(target.address)
    if running is not None:
        if sorted(running) != sorted(target.models):
            raise ApplicationError(
                f"{target.address} serves {sorted(running)}, the config {sorted(target.models)}; "
                "stop what runs there, or give the config another http_options.port"
            )
        tell(f"using the application that runs at {target.address}")
        wait_until_ready(target.address)
        yield target.address
        return
    tell(f"nothing answers at {target.address}: starting the application for this job")
    with _own_application(content):
        wait_until_ready(target.address)
        tell(f"ready at {target.address}")
        yield target.address


@contextmanager
def _own_application(content: Mapping[str, Any]) -> Iterator[None]:
    from app.builder import build  # torch and diffusers: not needed where the application runs already

    application = content["applications"][0]
    name = application.get("name", "default")
    own_ray = not ray.is_initialized()
    # Inside a Ray job RAY_ADDRESS names the job's cluster.  Elsewhere no cluster is joined by accident.
    if own_ray:
        ray.init(address=os.environ.get("RAY_ADDRESS") or "local", log_to_driver=False)
    own_serve = "SERVE_CONTROLLER_ACTOR" not in _named_actors()
    try:
        serve.start(
            proxy_location=content.get("proxy_location", "HeadOnly"), http_options=dict(content["http_options"])
        )
        try:
            serve.run(
                build(Worldstage.model_validate(application.get("args", {}))),
                name=name,
                route_prefix=application.get("route_prefix", "/"),
            )
        except RuntimeError as error:
            raise ApplicationError(f"application {name!r} failed to start: {error}") from error
        yield
    finally:
        if own_serve:
            serve.shutdown()
        else:
            serve.delete(name)
        if own_ray:
            ray.shutdown()


def _named_actors() -> list[str]:
    return [actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True)]


def _models_at(address: str) -> list[str] | None:
    """Names of the models served at an address; None where nothing listens.  Raises ApplicationError."""
    try:
        listed = get_json(f"{address}/v1/models")
        return [model["id"] for model in listed["data"]]
    except urllib.error.HTTPError as error:
        if error.code == 503:  # starting
            raise ApplicationError(f"{address}/v1/models: 503, what runs there is not ready; try again") from error
        raise ApplicationError(f"{address}/v1/models: {error}; something else listens there") from error
    except urllib.error.URLError as error:
        if isinstance(error.reason, ConnectionRefusedError):
            return None
        raise ApplicationError(f"{address}: {error.reason}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ApplicationError(f"{address}/v1/models: no list of models; something else listens there") from error


def wait_until_ready(address: str) -> None:
    """Return once every model has done its warm-up request.  Raises ApplicationError after `READY_TIMEOUT_S`."""
    end, reason = time.monotonic() + READY_TIMEOUT_S, ""
    while time.monotonic() < end:
        try:
            get_json(f"{address}/ready")
        except urllib.error.HTTPError as error:
            reason = error.read().decode(errors="replace")
        except urllib.error.URLError as error:
            reason = str(error.reason)
        else:
            return
        time.sleep(PROBE_S)
    raise ApplicationError(f"{address}/ready did not answer 200 within {READY_TIMEOUT_S:g} s: {reason}")


def get_json(url: str, timeout_s: float = 60.0) -> Any:
    """The JSON at a URL.  Raises urllib's errors and ValueError."""
    with urllib.request.urlopen(url, timeout=timeout_s) as response:
        return json.load(response)
