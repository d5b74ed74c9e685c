"""How a caller learns that a gang broke.  A module of its own: the driver needs it, and no torch."""

from __future__ import annotations


class GangLost(RuntimeError):
    """The gang broke while it had the request; another one, or the same restarted, can take it."""
