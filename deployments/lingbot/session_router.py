"""Which replica of a deployment gets a world's calls: always the same one, while it lives.

Serve pickles the class by value, so everything it needs is imported inside its methods.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ray.serve.request_router import RequestRouter

if TYPE_CHECKING:
    from ray.serve._private.request_router.common import PendingRequest
    from ray.serve._private.request_router.replica_wrapper import RunningReplica


class SessionRouter(RequestRouter):
    """The call's `session_id` names a world.  Rendezvous hashing: a replica that comes or goes moves its own share of
    the worlds and no other.  It never raises: Serve would leave the caller waiting for ever."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Candidates in order of preference; an empty list makes Serve back off and ask again."""
        import hashlib

        if pending_request is None:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True  # without it an empty list spins
        if not candidate_replicas:
            return []
        session = pending_request.metadata.session_id or ""

        def rank(replica: RunningReplica) -> bytes:
            return hashlib.blake2b(f"{replica.replica_id}:{session}".encode()).digest()

        return [[max(candidate_replicas, key=rank)]]
