"""What operators see of the latent cache and do with it; there on a server that has one.

Entries of all tenants are shown, without their prompts: a gateway must keep `/v1/caches` for operators.
"""

from __future__ import annotations

import re
import time
from typing import Annotated, Any, Literal, Protocol

from fastapi import FastAPI, Query
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request

from app.api.body import JSON, FormFields, expect_no_body, read_fields
from app.api.errors import (
    BodyTooLarge,
    InvalidBody,
    InvalidValue,
    NotReady,
    UnknownEntry,
    UnknownField,
    UnsupportedMediaType,
    documented,
    shown,
)
from app.api.query import Limit
from app.api.validation import validated
from cache_actors.blob_store import Pin
from cache_actors.latent_entries import EntryFilter, Kind

MAX_BODY_BYTES = 4096
RETRY_AFTER_S = 2.0
"""About the time in which Ray restarts a lost actor."""


class LatentCacheCalls(Protocol):
    """`cache_actors.latent_cache_actor.LatentCacheClient`, or a fake.  `call` raises CacheAway, a RuntimeError."""

    async def call(self, method: str, *args: object) -> Any:
        """A method of `LatentCacheHost`."""
        ...


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid")


class LookupCount(_Record):
    """Lookups of one outcome."""

    level: int | None
    decision: str
    reason: str | None
    count: int


class SimilarStats(_Record):
    """Level 2."""

    donors: int
    index_bytes: int
    shadow_ssim: dict[str, float] = Field(description="Mean of the latest shadow runs, by skipped steps.")
    suspended_tiers: list[int]


class LatentCacheStats(_Record):
    """Counters since the actor's start; entries and bytes as they are now."""

    mode: Literal["read_write", "read_only", "write_only"]
    warming: bool = Field(description="Entries of an earlier run are still being read.")
    entries: dict[str, int] = Field(description="By kind.")
    disk_bytes: int
    budget_bytes: int
    save_queue_bytes: int
    lookups: list[LookupCount]
    hit_rate: dict[str, float] = Field(description="By level, of all lookups that were no bypass.")
    lookup_ms: dict[str, float] = Field(description="p50 and p99 of the latest.")
    skipped_steps: int
    saved_gpu_seconds: float
    saves: dict[str, int] = Field(description="By what became of them.")
    removed: dict[str, int] = Field(description="By reason.")
    audit: dict[str, int] = Field(description="Lines by event.")
    similar: SimilarStats | None = Field(description="null with level 2 off.")


class EntryPin(_Record):
    """Why an entry is not evicted."""

    owner: str
    until: float = Field(description="Unix seconds.")


class LatentEntry(_Record):
    """One stored entry, without its prompt."""

    id: str
    partition: str
    kind: Kind
    tenant: str
    prompt_sha256: str
    seed: int
    num_inference_steps: int
    steps: list[int] = Field(description="state: its step; donor: steps whose latents it holds.")
    derived_depth: int
    parent: str | None
    job_id: str
    gpu_seconds: float
    embedder: str | None
    bytes: int
    created_at: float
    expires_at: float | None
    pin: EntryPin | None


class EntryList(_Record):
    """A page, latest use first."""

    object: Literal["list"] = "list"
    data: list[LatentEntry]
    first_id: str | None
    last_id: str | None
    has_more: bool


class EntryDeleted(_Record):
    """Answer to a deletion."""

    id: str
    object: Literal["latent_cache.entry.deleted"] = "latent_cache.entry.deleted"
    deleted: Literal[True] = True


class Purged(_Record):
    """What was, or would be, removed."""

    entries: list[str]
    bytes: int
    dry_run: bool


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class PinRequest(_Body):
    """Body of a pin."""

    owner: str = Field(pattern=r"^[A-Za-z0-9._@-]{1,64}$", description="Who wants it.")
    seconds: float = Field(gt=0, le=365 * 86400, description="From now on.")


class PurgeRequest(_Body):
    """Body of a purge: entries that fit every field that is given; without any, all."""

    kind: Kind | None = None
    tenant: str | None = None
    partition: str | None = None
    prompt_sha256: str | None = None
    older_than_s: float | None = Field(None, ge=0, description="Since they were stored.")
    dry_run: bool = Field(False, description="Only tell.")


def add_routes(app: FastAPI, cache: LatentCacheCalls) -> None:
    """Put the endpoints on `app`."""
    there = (UnknownField, UnknownEntry, NotReady)
    body_errors = (InvalidValue, UnknownField, InvalidBody, BodyTooLarge, UnsupportedMediaType, NotReady)

    @app.get(
        "/v1/caches/latent",
        responses=documented(UnknownField, NotReady),
        operation_id="get_latent_cache",
        summary="State of the latent cache",
    )
    async def stats() -> LatentCacheStats:
        return LatentCacheStats.model_validate(await _ask(cache, "stats"))

    @app.get(
        "/v1/caches/latent/entries",
        responses=documented(InvalidValue, UnknownField, UnknownEntry, NotReady),
        operation_id="list_latent_cache_entries",
        summary="Stored entries, latest use first",
    )
    async def entries(
        limit: Limit = 20,
        after: Annotated[str | None, Query(description="Id of the last entry of the page before.")] = None,
        kind: Annotated[Kind | None, Query(description="Of this kind alone.")] = None,
        tenant: Annotated[str | None, Query(description="Of this tenant alone.")] = None,
        partition: Annotated[str | None, Query(description="Of this partition alone.")] = None,
        prompt_sha256: Annotated[str | None, Query(description="Of this prompt alone, by the hash in entries.")] = None,
    ) -> EntryList:
        which = EntryFilter(kind=kind, tenant=tenant, partition=partition, prompt_sha256=prompt_sha256)
        found = await _ask(cache, "entries", which, limit + 1, None if after is None else _known(after, "after"))
        if found is None:
            raise UnknownEntry(f"after: no entry {shown(after)}, or no more", "after")
        page = [LatentEntry.model_validate(entry) for entry in found[:limit]]
        ends = (page[0].id, page[-1].id) if page else (None, None)
        return EntryList(data=page, first_id=ends[0], last_id=ends[1], has_more=len(found) > limit)

    @app.get(
        "/v1/caches/latent/entries/{entry_id}",
        responses=documented(*there),
        operation_id="get_latent_cache_entry",
        summary="One entry",
    )
    async def entry(entry_id: str) -> LatentEntry:
        return _entry(entry_id, await _ask(cache, "entry", _known(entry_id)))

    @app.delete(
        "/v1/caches/latent/entries/{entry_id}",
        responses=documented(*there),
        operation_id="delete_latent_cache_entry",
        summary="Remove an entry, pinned or not",
    )
    async def delete(entry_id: str) -> EntryDeleted:
        if not await _ask(cache, "remove", _known(entry_id)):
            raise _no_entry(entry_id)
        return EntryDeleted(id=entry_id)

    @app.put(
        "/v1/caches/latent/entries/{entry_id}/pin",
        responses=documented(*body_errors, UnknownEntry),
        openapi_extra=_json_body(PinRequest),
        operation_id="pin_latent_cache_entry",
        summary="Keep an entry from eviction for a while",
    )
    async def pin(entry_id: str, request: Request) -> LatentEntry:
        asked = validated(PinRequest, await _fields(request))
        wanted = Pin(asked.owner, time.time() + asked.seconds)
        return _entry(entry_id, await _ask(cache, "pin", _known(entry_id), wanted))

    @app.delete(
        "/v1/caches/latent/entries/{entry_id}/pin",
        responses=documented(UnknownField, InvalidBody, BodyTooLarge, UnknownEntry, NotReady),
        operation_id="unpin_latent_cache_entry",
        summary="Let an entry be evicted again",
    )
    async def unpin(entry_id: str, request: Request) -> LatentEntry:
        await expect_no_body(request)
        return _entry(entry_id, await _ask(cache, "pin", _known(entry_id), None))

    @app.post(
        "/v1/caches/latent/purge",
        responses=documented(*body_errors),
        openapi_extra=_json_body(PurgeRequest),
        operation_id="purge_latent_cache",
        summary="Remove entries",
    )
    async def purge(request: Request) -> Purged:
        asked = validated(PurgeRequest, await _fields(request))
        which = EntryFilter(**asked.model_dump(exclude={"dry_run"}))
        return Purged.model_validate(await _ask(cache, "purge", which, asked.dry_run))


async def _ask(cache: LatentCacheCalls, method: str, *args: object) -> Any:
    try:
        return await cache.call(method, *args)
    except RuntimeError as away:
        raise NotReady("the latent cache does not answer", retry_after_s=RETRY_AFTER_S) from away


async def _fields(request: Request) -> dict[str, Any]:
    return await read_fields(request, MAX_BODY_BYTES, FormFields(numbers=(), lists=()))


def _known(entry_id: str, param: str = "entry_id") -> str:
    """`entry_id` when it could be one.  Raises UnknownEntry."""
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,80}", entry_id):
        raise UnknownEntry(f"{param}: no entry {shown(entry_id)}", param)
    return entry_id


def _entry(entry_id: str, found: dict[str, Any] | None) -> LatentEntry:
    if found is None:
        raise _no_entry(entry_id)
    return LatentEntry.model_validate(found)


def _no_entry(entry_id: str) -> UnknownEntry:
    return UnknownEntry(f"entry_id: no entry {shown(entry_id)}; it may have been evicted", "entry_id")


def _json_body(model: type[BaseModel]) -> dict[str, Any]:
    return {"requestBody": {"required": True, "content": {JSON: {"schema": model.model_json_schema()}}}}
