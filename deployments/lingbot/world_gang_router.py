"""Which gang gets a world's calls: its own while that lives, else one by the world's name.

Serve pickles the class by value, so everything it needs is imported inside its methods.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ray.serve.request_router import RequestRouter

if TYPE_CHECKING:
    from ray.serve._private.request_router.common import PendingRequest
    from ray.serve._private.request_router.replica_wrapper import RunningReplica


class WorldGangRouter(RequestRouter):
    """The call's `session_id` is ``world|gang``; the gang is empty for a world that has none yet.

    Calls go to ranks 0.  Rendezvous hashing spreads new worlds over the gangs, those of a lost gang over the others.
    It neither raises nor drops a call: Serve would leave the caller waiting for ever.
    """

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Candidates in order of preference; an empty list makes Serve back off and ask again."""
        import hashlib

        heads = [replica for replica in candidate_replicas if replica.replica_metadata.get("rank") == 0]
        if pending_request is None:
            return [heads] if heads else []
        pending_request.routing_context.should_backoff = True  # without it an empty list spins
        if not heads:
            return []
        world, _, pinned = (pending_request.metadata.session_id or "").partition("|")

        def preference(replica: RunningReplica) -> tuple[bool, bytes]:
            gang = replica.replica_metadata["gang"]
            return gang == pinned, hashlib.blake2b(f"{gang}:{world}".encode()).digest()

        return [[max(heads, key=preference)]]
