"""Journal entries survive bytes exactly, and nothing else passes for one."""

from __future__ import annotations

import pytest
import torch

from deployments.lingbot.controls import ChunkControls, Keys
from deployments.lingbot.journal import JournalEntry, JournalError

ENTRY = JournalEntry(ChunkControls(Keys((frozenset("w"),) * 4), "räin \n"), torch.randn(1, 16, 2, 4, 6))


def test_round_trip_is_exact() -> None:
    again = JournalEntry.from_bytes(ENTRY.to_bytes())
    assert again.controls == ENTRY.controls
    assert torch.equal(again.latents, ENTRY.latents)
    assert again.to_bytes() == ENTRY.to_bytes()


def test_damaged_bytes_are_refused() -> None:
    data = ENTRY.to_bytes()
    for wrong in (b"", data[:-1], data[: len(data) // 2], b"{}" * 40):
        with pytest.raises(JournalError, match=r"journal entry of \d+ bytes: cannot be read"):
            JournalEntry.from_bytes(wrong)
    half = JournalEntry(ENTRY.controls, ENTRY.latents.half())
    with pytest.raises(JournalError, match="float16, expected 5 axes, fp32"):
        JournalEntry.from_bytes(half.to_bytes())
