"""All that the HTTP surface needs to serve worlds; without it their endpoints do not exist.

Imports what worlds need only when they are served: the module itself is imported with every application.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fastapi import FastAPI

from app.config import Http
from app.worlds.world_card import WorldCard

if TYPE_CHECKING:
    from app.api.world_content import FrameFiles
    from app.api.world_sessions import WorldSessions


@dataclass(frozen=True)
class WorldSurface:
    """sessions: the world driver.  cards: the served world models.  files: where frames are."""

    sessions: WorldSessions
    cards: Sequence[WorldCard]
    files: FrameFiles
    max_image_bytes: int

    def add_routes(self, app: FastAPI, http: Http) -> None:
        """Put the endpoints on `app`."""
        from app.api import world_content, world_stream, worlds

        worlds.add_routes(app, self.sessions, self.cards, http.max_body_bytes, self.max_image_bytes)
        world_content.add_routes(app, self.sessions, self.files)
        world_stream.add_routes(app, self.sessions, self.cards)
