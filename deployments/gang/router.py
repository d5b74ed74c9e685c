"""Which replica of a gang deployment gets a call: always a rank 0, of the pinned gang while it lives.

Serve pickles the class by value, so everything it needs is imported inside its methods.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ray.serve.request_router import RequestRouter

if TYPE_CHECKING:
    from ray.serve._private.request_router.common import PendingRequest
    from ray.serve._private.request_router.replica_wrapper import RunningReplica


class GangRouter(RequestRouter):
    """The call's `session_id` names a gang, or is empty for the least busy one.

    It neither raises nor drops a call whose gang is gone: Serve would leave the caller waiting for ever.  The call goes
    to another gang, and the first event of its stream says which.
    """

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Candidates in order of preference; an empty list makes Serve back off and ask again."""
        heads = [replica for replica in candidate_replicas if replica.replica_metadata.get("rank") == 0]
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True  # without it an empty list spins
            pinned = [r for r in heads if r.replica_metadata["gang"] == pending_request.metadata.session_id]
            heads = pinned or heads
        return [heads] if heads else []
