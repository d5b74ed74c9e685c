"""How the ranks of a gang find each other: rank 0 opens a store and leaves its address in Ray's key-value store.

The key holds the gang's id, and a restarted gang has a new id, so a stale address can not be taken for a living one.
"""

from __future__ import annotations

import time
from datetime import timedelta

import ray
import torch.distributed as dist
from ray.experimental import internal_kv

NAMESPACE = b"worldstage"
POLL_S = 0.1


def meet(gang_id: str, rank: int, world_size: int, timeout_s: float) -> dist.Store | None:
    """The store the gang meets at; None for a gang of one.  Raises TimeoutError when rank 0 does not show up."""
    if world_size == 1:
        return None
    key = f"gang/{gang_id}".encode()
    host = ray.util.get_node_ip_address()
    timeout = timedelta(seconds=timeout_s)
    if rank == 0:
        store = dist.TCPStore(host, 0, world_size, is_master=True, timeout=timeout, wait_for_workers=False)
        internal_kv._internal_kv_put(key, f"{host} {store.port}".encode(), overwrite=True, namespace=NAMESPACE)
        return store
    deadline = time.monotonic() + timeout_s
    while (address := internal_kv._internal_kv_get(key, namespace=NAMESPACE)) is None:
        if time.monotonic() > deadline:
            raise TimeoutError(f"gang {gang_id}: rank 0 left no address within {timeout_s:.0f} s; see its log")
        time.sleep(POLL_S)
    master, port = address.decode().split()
    return dist.TCPStore(master, int(port), world_size, is_master=False, timeout=timeout)


def leave(gang_id: str) -> None:
    """Rank 0, after the gang has met: the address has served its purpose."""
    internal_kv._internal_kv_del(f"gang/{gang_id}".encode(), namespace=NAMESPACE)
