"""Rules every test shares: what `gpu` means."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips tests marked `gpu` on a machine without CUDA."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked:
        import torch  # two seconds that a run without such tests need not spend

        if not torch.cuda.is_available():
            for item in marked:
                item.add_marker(pytest.mark.skip(reason="needs CUDA"))
