"""The Serve replica of one rank of a world gang: rank 0 also says what the gang still has of a world."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict, cast

from deployments.gang.rank import RankSpec
from deployments.gang.stage_replica import StageReplica
from deployments.lingbot.process_name import process_name
from deployments.lingbot.world_worker import WorldWorker


class Window(TypedDict):
    """Reply of `WorldReplica.window`."""

    gang: str
    device: str
    """Kind of device and software, as `process_name` gives it."""
    live: int
    """Chunks of the path that the world's window can go on from, 0 for none."""
    kept: list[bool]
    """For each chunk of the path, whether every rank has its keys and values."""
    prompts: list[str]
    """Whose embeddings need not be sent again while the window lives, nor need the condition; empty: all must be."""


class WorldReplica(StageReplica):
    """One rank.  The facts it tells can have changed when they are used: a request built on them is then stale."""

    def __init__(self, spec: RankSpec) -> None:
        super().__init__(spec)
        self._device = process_name(spec.device(self._rank_number), spec.threads)

    async def window(self, world: str, keys: Sequence[str]) -> Window:
        """Rank 0: what the gang has of a world with this path.  keys: node keys (hex) of its chunks."""
        worker = cast(WorldWorker, self._rank.worker)
        path = [bytes.fromhex(key) for key in keys]
        return Window(
            gang=self._gang_id,
            device=self._device,
            live=worker.live(world, path),
            kept=worker.kept(path),
            prompts=worker.prompts(world),
        )
