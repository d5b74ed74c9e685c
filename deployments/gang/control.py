"""The control channel: rank 0 announces, the others follow.

A group of its own, with a timeout of days: an idle gang waits here, and a rank that dies breaks the wait at once.
"""

from __future__ import annotations

from collections import deque
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from deployments.gang.messages import HEADER_FIELDS, Message, decode, encode, payload_bytes

IDLE_TIMEOUT = timedelta(days=365)
UNTAKEN_MESSAGES = 256
"""Announcements a follower may be behind before rank 0 waits for it; each is a few bytes, an Open some megabytes."""


class Announcer(Protocol):
    """Rank 0's end."""

    def announce(self, message: Message) -> None:
        """Tell every other rank; returns at once."""


class Silent:
    """The announcer of a gang of one rank."""

    def announce(self, message: Message) -> None:
        """Nobody listens."""


class ControlChannel:
    """gloo point-to-point, rank 0 to all.  Every process of the gang constructs it at the same point."""

    def __init__(self) -> None:
        self._group = dist.new_group(backend="gloo", timeout=IDLE_TIMEOUT)
        self._sending: deque[tuple[dist.Work, Tensor]] = deque()

    def announce(self, message: Message) -> None:
        """Send to ranks 1.. without waiting for them; a follower's loss shows as an error of a later call."""
        while len(self._sending) > UNTAKEN_MESSAGES:
            self._sending.popleft()[0].wait()
        header, payload = encode(message)
        for rank in range(1, dist.get_world_size()):
            for tensor in (header,) if payload is None else (header, payload):
                work = dist.isend(tensor, group=self._group, group_dst=rank)
                assert work is not None  # None is for ranks outside the group
                self._sending.append((work, tensor))

    def flush(self) -> None:
        """Wait until everything announced has been taken."""
        while self._sending:
            self._sending.popleft()[0].wait()

    def follow(self) -> Message:
        """Wait for the next message of rank 0; its loss raises RuntimeError."""
        header = torch.empty(HEADER_FIELDS, dtype=torch.int64)
        dist.recv(header, group=self._group, group_src=0)
        payload = None
        if size := payload_bytes(header):
            payload = torch.empty(size, dtype=torch.uint8)
            dist.recv(payload, group=self._group, group_src=0)
        return decode(header, payload)
