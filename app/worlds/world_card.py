"""What the application knows of a served world model once its checkpoint has been opened: no weights, only facts."""

from __future__ import annotations

from app.config import Closed, WorldLimits, WorldStream, WorldTopology


class WorldCard(Closed):
    """One served world model, for requests to be checked against and for `GET /v1/models`."""

    name: str
    created: int
    """Unix seconds at which this application was built."""
    fingerprint: str
    """SHA-256 over the transformer's files."""
    dtype: str
    topology: WorldTopology
    stream: WorldStream
    fps: int
    default_pixels: int
    """Area of a world whose request names no size."""
    limits: WorldLimits
