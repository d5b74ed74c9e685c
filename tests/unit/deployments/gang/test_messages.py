"""What rank 0 announces arrives as it was sent."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deployments.gang.messages import HEADER_FIELDS, Close, Message, Open, Run, Stop, decode, encode, payload_bytes

NUMBERS = st.integers(0, 2**62)
DIGESTS = st.integers(0, 2**63 - 1)


def sent(message: Message) -> Message:
    """Through the wire format."""
    header, payload = encode(message)
    assert (header.shape, header.dtype) == ((HEADER_FIELDS,), torch.int64)
    assert payload_bytes(header) == (0 if payload is None else payload.numel())
    return decode(header, payload)


@given(NUMBERS, NUMBERS, DIGESTS, st.booleans())
def test_small_messages(request: int, position: int, digest: int, native: bool):
    for message in (Run(request, position, digest, native), Close(request), Stop()):
        assert sent(message) == message
        assert encode(message)[1] is None  # a step costs one small send


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_open_carries_plain_data_and_tensors(dtype: torch.dtype):
    tensors = {"text.positive": torch.arange(6, dtype=dtype).view(1, 3, 2), "latents": torch.zeros(0, dtype=dtype)}
    spec = {"task": {"prompt": "ein roter Kreis ○", "shape": [1, 16, 3]}, "resume": None}
    message = sent(Open(5, spec, tensors))
    assert isinstance(message, Open)
    assert (message.request, message.spec) == (5, spec)
    assert list(message.tensors) == sorted(tensors) or set(message.tensors) == set(tensors)
    for name, tensor in tensors.items():
        assert message.tensors[name].dtype == dtype
        assert torch.equal(message.tensors[name], tensor)


def test_an_open_without_tensors():
    assert sent(Open(1, {}, {})) == Open(1, {}, {})


def test_an_unknown_kind_is_refused():
    with pytest.raises(ValueError, match="99"):
        decode(torch.tensor([99, 0, 0, 0]), None)
