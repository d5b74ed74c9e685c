"""Where a checkpoint is: a local folder, or a hub repository at a pinned commit."""

from __future__ import annotations

import re
from pathlib import Path

import huggingface_hub
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from deployments.wan.checkpoint_files import STEMS, CheckpointError

HUB_PATTERNS = [
    "model_index.json",
    "scheduler/*.json",
    "tokenizer/*.json",
    "tokenizer/*.model",
    *(f"{component}/*.json" for component in STEMS),
    *(f"{component}/{stem}{shard}.safetensors" for component, stem in STEMS.items() for shard in ("", "-*-of-*")),
]
"""Files of a hub repository that are fetched: no second weight format, no variant, no example video."""


def locate(source: str, revision: str | None) -> Path:
    """The folder of a checkpoint; a hub id's files are fetched first, unless they are cached.

    source: folder, or hub id "owner/name".  A folder of that name wins.
    revision: commit of a hub id, 40 hexadecimal digits.  HF_HUB_OFFLINE allows cached commits alone.
    """
    folder = Path(source).expanduser()
    if folder.is_dir():
        if revision is not None:
            raise CheckpointError(f"revision: got {revision!r} with the local folder {folder}; leave it out")
        return folder.resolve()
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", source, re.ASCII):
        raise CheckpointError(f"checkpoint: no folder at {folder.absolute()}; a hub id would be 'owner/name'")
    if revision is None or not re.fullmatch(r"[0-9a-f]{40}", revision):
        raise CheckpointError(
            f"revision: got {revision!r} for {source!r}, which is no folder at {folder.absolute()}; as a hub id it "
            "needs the 40 hexadecimal digits of a commit, because branches and tags can move to other weights"
        )
    try:
        return Path(huggingface_hub.snapshot_download(source, revision=revision, allow_patterns=HUB_PATTERNS))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise CheckpointError(f"checkpoint: {source!r} at {revision} could not be fetched: {error}") from error
