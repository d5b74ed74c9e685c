"""The entries of the latent cache: their names, their facts on disk, and a check of what a tensor file holds.

result-<request>   level 0: the files, computed from noise       approx-<request>   the same, from a level-2 hit
state-<trajectory> level 1: `state`, a solver state at `step`
donor-<partition, prompt, seed> level 2: `vector`, and `latents-<K>` for each kept step

A name alone tells an entry from every other, so it is what reports and operators call it by.
"""

from __future__ import annotations

import json
from typing import Any, Literal

from pydantic import Field

from cache_actors.blob_store import Entry, EntryKey
from cache_actors.closed import Closed, Sha256
from cache_actors.latent_key import LatentIdentity, canonical_sha256

Kind = Literal["result", "approx", "state", "donor"]


class BadLatents(ValueError):
    """A payload that is not the tensor file it should be."""


class EntryFacts(Closed):
    """What the manifest says beside sizes and hashes."""

    kind: Kind
    tenant: str
    prompt: str = Field(description="Cleaned.")
    prompt_sha256: Sha256
    seed: int
    partition_fields: dict[str, str]
    num_inference_steps: int
    steps: tuple[int, ...] = Field((), description="state: its step; donor: steps whose latents it holds.")
    derived_depth: int = Field(0, ge=0, description="Level-2 hits behind it; 0: computed from noise.")
    parent: str | None = Field(None, description="Name of the donor that it derives from.")
    job_id: str
    gpu_seconds: float = Field(ge=0)
    embedder: str | None = Field(None, description="donor: fingerprint of the embedder of `vector`.")


def entry_key(kind: Kind, identity: LatentIdentity) -> EntryKey:
    """Where an entry of this request is stored."""
    match kind:
        case "result" | "approx":
            name = identity.request()
        case "state":
            name = identity.trajectory()
        case "donor":
            fields = {"partition": identity.partition(), "prompt": identity.prompt, "seed": identity.seed}
            name = canonical_sha256("donor", fields)
    return EntryKey(identity.partition(), f"{kind}-{name}")


def latents_blob(step: int) -> str:
    """Name of a donor's latents entering `step`."""
    return f"latents-{step:04d}"


def prompt_sha256(prompt: str) -> str:
    """Stands for a prompt in logs and filters."""
    return canonical_sha256("prompt", {"prompt": prompt})


def check_latents(data: bytes, identity: LatentIdentity) -> None:
    """Raises BadLatents unless `data` is a safetensors file whose `latents` have the request's shape and dtype.

    Reads the header alone, so the cache needs no torch.
    """
    try:
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        latents = header["latents"]
        begin, end = latents["data_offsets"]
        whole = len(data) == 8 + length + max(x["data_offsets"][1] for n, x in header.items() if n != "__metadata__")
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise BadLatents(f"payload: no safetensors file with a tensor `latents`: {error!r}") from error
    names = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
    dtype, shape = names.get(latents["dtype"], latents["dtype"]), tuple(latents["shape"])
    if shape != identity.latent_shape or dtype != identity.latent_dtype:
        raise BadLatents(
            f"latents: got {dtype} {shape}, expected {identity.latent_dtype} {identity.latent_shape}; "
            "store what the request's own solver holds"
        )
    if not whole or end <= begin:
        raise BadLatents("payload: the file is cut short")


class EntryFilter(Closed):
    """Which entries; fields that are None do not restrict."""

    kind: Kind | None = None
    tenant: str | None = None
    partition: str | None = None
    prompt_sha256: str | None = None
    older_than_s: float | None = None

    def admits(self, entry: Entry, now: float) -> bool:
        """Whether an entry is meant."""
        facts = entry.facts
        return (
            self.kind in (None, facts["kind"])
            and self.tenant in (None, facts["tenant"])
            and self.partition in (None, entry.key.partition)
            and self.prompt_sha256 in (None, facts["prompt_sha256"])
            and (self.older_than_s is None or now - entry.created >= self.older_than_s)
        )


def shown(entry: Entry) -> dict[str, Any]:
    """An entry as an operator sees it: no prompt, no digests."""
    facts = EntryFacts.model_validate(entry.facts)
    return {
        "id": entry.key.name,
        "partition": entry.key.partition,
        **facts.model_dump(exclude={"prompt", "partition_fields"}),
        "bytes": entry.disk_bytes,
        "created_at": entry.created,
        "expires_at": entry.expires,
        "pin": None if entry.pin is None else {"owner": entry.pin.owner, "until": entry.pin.until},
    }
