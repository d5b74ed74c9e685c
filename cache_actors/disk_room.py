"""Whether a cache's folder can hold its budget, asked before anything is served."""

from __future__ import annotations

import shutil
from pathlib import Path

from cache_actors.blob_store import StoreError


def check_disk(block: str, root: Path, budget_gib: float) -> None:
    """Raises StoreError when the folder cannot be made or the disk has less room than the budget.

    block: of the config, for complaints.
    """
    budget = int(budget_gib * 2**30)
    try:
        root.mkdir(parents=True, exist_ok=True)
        room = shutil.disk_usage(root).free
        if room < budget:  # what is stored already is part of the budget
            room += sum(path.stat().st_size for path in root.rglob("*") if path.is_file())
    except OSError as error:
        raise StoreError(f"{block}.root: {root} cannot be used: {error}; name a writable folder") from error
    if room < budget:
        raise StoreError(
            f"{block}.budget_gib: {budget_gib} exceeds the {room / 2**30:.1f} GiB that {root} can hold; "
            "lower it or name a folder on a larger disk"
        )
