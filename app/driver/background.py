"""Tasks that nobody waits for, and what went wrong in them."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Coroutine
from typing import Any


class Background:
    """Starts tasks, keeps them alive, and remembers the first that failed by surprise."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        self.failure: BaseException | None = None
        """What ended a task that should not have failed; whoever is asked for its health raises it."""

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run `work` on the running loop."""
        # An empty context: a Serve handle used in the context of one request takes concurrent calls for one and the
        # same, and cancels them with that request.
        task = asyncio.get_running_loop().create_task(work, context=contextvars.Context())
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and self.failure is None:
            self.failure = task.exception()
