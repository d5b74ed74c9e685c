"""Why a request runs without the step cache."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class NativeReason:
    """A request is served native, and this says why.

    ``code`` is one of a small fixed set (a field of the profile's request, ``memory``, ``guidance_off``,
    ``error_limit``, ``nonfinite``) and labels a counter; ``message`` is for the reader of the job.
    """

    code: str
    message: str
