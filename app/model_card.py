"""What the application knows of a served model once its checkpoint has been opened: no weights, only facts."""

from __future__ import annotations

from app.config import Closed, Topology, VideoDefaults, VideoLimits


class ModelCard(Closed):
    """One served text-to-video model, for requests to be checked against and for `GET /v1/models`."""

    name: str
    created: int
    """Unix seconds at which this application was built."""
    fingerprint: str
    """SHA-256 over the checkpoint's weight files."""
    experts: int
    """1, or 2 for a high-noise and a low-noise transformer (Wan2.2-A14B)."""
    dtype: str
    topology: Topology
    defaults: VideoDefaults
    flow_shift: float
    """Effective default of `flow_shift`: the configuration's, else the checkpoint's scheduler."""
    limits: VideoLimits
