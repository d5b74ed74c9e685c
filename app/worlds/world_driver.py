"""The world driver: opens worlds, makes their chunks on gangs, keeps them durable, brings them back.

    path of a chunk    cache? ──no──> gang (catch up, denoise) ──> storage ──> table ──> answer
                         └──yes──────────────────────────────────────┘          └──> decoder ──> frames

A chunk is told of once its latents are in the storage and its row in the table: all else can be lost.  A gang that is
lost is replaced by a replay elsewhere, a lost driver reads the table, and every way gives the same bits.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import secrets
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import numpy as np

from app.api.errors import ApiError, NotReady
from app.api.video_jobs import Order, Readiness
from app.api.world_errors import ChunkFailed, UnknownChunk, UnknownWorld, WorldMovedOn, WorldsFull
from app.api.world_sessions import ImageKind, WorldPage
from app.config import Jobs, Worlds
from app.driver.background import Background
from app.driver.failure import cause_of, worker_was_lost
from app.worlds.chunk_sharing import ChunkSharing
from app.worlds.gang_call import Done, park
from app.worlds.journal_files import JournalFiles
from app.worlds.live_world import LiveWorld, Material
from app.worlds.model_services import WorldServices
from app.worlds.served_model import ServedModel
from app.worlds.warm_up import WorldReadiness
from app.worlds.world_request import ChunkRequest, ChunkView, WorldParams, WorldView, chunk_controls
from app.worlds.world_state import Chunk, Parent, Timings, World
from app.worlds.world_store import WorldNotFound, WorldStore, WorldTakenOver
from cache_actors.keys import image_digest, world_root
from deployments.lingbot.controls import ChunkControls
from deployments.lingbot.journal import JournalEntry
from deployments.lingbot.session import World as GangWorld
from deployments.lingbot.stream_config import pixel_frames
from deployments.storage import ObjectNotFound, Storage, StorageUnavailable

UNDECODED = 3
"""Chunks of one world that may wait for the decoder: where it is the slower part, the gang does not run away."""
AWAY_S = 10.0
"""Longest wait for replicas that are told to let a world go; those that are being replaced hold nothing."""
PARK_LOOK_S = 2.0
"""Between two looks for worlds that nobody uses."""

T = TypeVar("T")

logger = logging.getLogger("ray.serve")


class WorldDriver:
    """Implements `app.api.world_sessions.WorldSessions` for all served world models.  Runs on one event loop."""

    def __init__(
        self, models: Sequence[WorldServices], worlds: Worlds, jobs: Jobs, sharing: ChunkSharing | None
    ) -> None:
        self._config, self._sharing = worlds, sharing
        self._files = JournalFiles(Storage(jobs.storage_url))
        self._store = WorldStore(jobs.database_url)
        self._background = Background()
        self._live: dict[str, LiveWorld] = {}
        self._models = {s.card.name: ServedModel(s, worlds.max_waiting, worlds.max_attempts) for s in models}
        self._readiness = {
            name: WorldReadiness(model, self._files, self._background) for name, model in self._models.items()
        }
        self._background.spawn(self._park_idle())

    async def check_health(self) -> None:
        """Raises once something has failed that no request is to blame for; Serve then starts another driver."""
        if self._background.failure is not None:
            raise RuntimeError("the world driver cannot go on") from self._background.failure

    async def readiness(self) -> dict[str, Readiness]:
        """Readiness by model name."""
        return {name: readiness.state() for name, readiness in self._readiness.items()}

    async def open(self, params: WorldParams, image: np.ndarray) -> WorldView:
        """See `WorldSessions`."""
        return await _apart(self._open(params, image))

    async def get(self, world_id: str) -> WorldView:
        """See `WorldSessions`."""
        return (await self._find(world_id)).view()

    async def page(self, limit: int, after: str | None, order: Order) -> WorldPage:
        """See `WorldSessions`."""
        try:
            ids = await asyncio.to_thread(self._store.ids, limit + 1, after, order)
        except WorldNotFound as error:
            raise UnknownWorld(str(error), "after") from error
        views = []
        for world_id in ids[:limit]:
            try:
                views.append(await self.get(world_id))
            except UnknownWorld:
                continue  # deleted since
        return WorldPage(views, len(ids) > limit)

    async def delete(self, world_id: str) -> None:
        """See `WorldSessions`."""
        await _apart(self._delete(world_id))

    async def grow(self, world_id: str, request: ChunkRequest, wait_for_frames: bool) -> list[ChunkView]:
        """See `WorldSessions`."""
        return await _apart(self._grow(world_id, request, wait_for_frames))

    async def chunk(self, world_id: str, index: int) -> ChunkView:
        """See `WorldSessions`."""
        return _chunk(await self._find(world_id), index)

    async def chunks(self, world_id: str) -> list[ChunkView]:
        """See `WorldSessions`."""
        live = await self._find(world_id)
        return [live.chunk_view(index) for index in range(len(live.stored.chunks))]

    async def frames(self, world_id: str, index: int) -> ChunkView:
        """See `WorldSessions`."""
        live = await self._find(world_id)
        view = _chunk(live, index)
        await _apart(self._frames(live, view.chunk.key))
        return view

    async def images(self, world_id: str, index: int, kind: ImageKind) -> list[bytes]:
        """See `WorldSessions`."""
        live = await self._find(world_id)
        return await _apart(self._images(live, _chunk(live, index), kind))

    async def fork(self, world_id: str, chunks: int) -> WorldView:
        """See `WorldSessions`."""
        return await _apart(self._fork(world_id, chunks))

    async def rewind(self, world_id: str, chunks: int) -> WorldView:
        """See `WorldSessions`."""
        return await _apart(self._rewind(world_id, chunks))

    async def park(self, world_id: str) -> WorldView:
        """See `WorldSessions`."""
        live = await self._find(world_id)
        await _apart(self._park(live))
        return live.view()

    async def resume(self, world_id: str) -> WorldView:
        """See `WorldSessions`."""
        return await _apart(self._resume(world_id))

    # --- worlds ----------------------------------------------------------------------------------------------------

    async def _open(self, params: WorldParams, image: np.ndarray) -> WorldView:
        model = self._model(params.model)
        await self._check_room()
        services = model.services
        pixels = np.ascontiguousarray(image)
        digest = image_digest(pixels.tobytes(), *pixels.shape[:2])
        material = await model.material(
            image=digest,
            prompt=params.prompt,
            seed=params.seed,
            width=params.width,
            height=params.height,
            refresh=True,
        )
        world = World(
            id=f"world_{secrets.token_hex(12)}",
            model=params.model,
            created_at=time.time(),
            prompt=params.prompt,
            seed=params.seed,
            width=params.width,
            height=params.height,
            fps=services.card.fps,
            shared=params.shared and self._sharing is not None,
            image=digest,
            root=world_root(material).hex(),
            material=material.canonical().decode(),
        )
        condition = await model.until_done(
            lambda: services.vae_of(world.id).condition.remote(image, params.height, params.width), "the VAE"
        )
        await asyncio.to_thread(self._files.put_condition, world.id, condition)
        if world.shared and self._sharing is not None:
            await self._sharing.open_world(material)
        live = LiveWorld(await asyncio.to_thread(self._store.create, world, [], world.created_at))
        self._live[world.id] = live
        return live.view()

    async def _delete(self, world_id: str) -> None:
        live = await self._find(world_id)
        async with live.turn:
            await asyncio.gather(*live.decodes.values(), return_exceptions=True)
            try:
                await asyncio.to_thread(self._store.delete, world_id)
            except WorldNotFound as error:
                raise UnknownWorld(str(error)) from error
            self._live.pop(world_id, None)
            live.deleted = True
            await self._let_go(live)
            await asyncio.to_thread(self._files.drop_world, world_id)

    async def _fork(self, world_id: str, chunks: int) -> WorldView:
        async with self._using(world_id) as live:
            _check_boundary(live, chunks)
            await self._check_room()
            kept = live.stored.chunks[:chunks]
            twin = live.stored.world.model_copy(
                update={
                    "id": f"world_{secrets.token_hex(12)}",
                    "created_at": time.time(),
                    "parent": Parent(world=world_id, chunks=chunks),
                }
            )
            await asyncio.to_thread(self._files.copy, world_id, twin.id, [chunk.key for chunk in kept])
            stored = await asyncio.to_thread(self._store.create, twin, kept, twin.created_at)
            made = self._live[twin.id] = LiveWorld(stored)
            made.gang = live.gang  # its keys and values are there
            return made.view()

    async def _rewind(self, world_id: str, chunks: int) -> WorldView:
        async with self._using(world_id) as live:
            _check_boundary(live, chunks)
            dropped = live.keys[chunks:]
            await asyncio.gather(*(live.decodes[k] for k in dropped if k in live.decodes), return_exceptions=True)
            if dropped:
                await self._write(live, self._store.truncate, live.stored, chunks, time.time())
                del live.controls[chunks:]
                await asyncio.to_thread(self._files.drop, world_id, [key for key in dropped if key not in live.keys])
        return live.view()

    async def _resume(self, world_id: str) -> WorldView:
        model = self._model((await self._find(world_id)).stored.world.model)
        async with model.request(), self._using(world_id) as live:
            await model.check(live.stored.world)
            done = await self._call(live, None)
            logger.info("%s: resumed, restored %s, replayed %d", world_id, done.restored, done.replayed)
        return live.view()

    # --- chunks ----------------------------------------------------------------------------------------------------

    async def _grow(self, world_id: str, request: ChunkRequest, wait_for_frames: bool) -> list[ChunkView]:
        asked = time.monotonic()
        model = self._model((await self._find(world_id)).stored.world.model)
        async with model.request(), self._using(world_id) as live:
            await model.check(live.stored.world)
            first = len(live.stored.chunks) if request.after is None else request.after
            if not 0 <= first <= len(live.stored.chunks):
                raise WorldMovedOn(f"after: got {first}, the world has {len(live.stored.chunks)} chunks", "after")
            wanted = chunk_controls(request, first, model.services.stream.chunk)
            limit = model.services.card.limits.max_chunks
            if first + len(wanted) > limit:
                raise WorldMovedOn(
                    f"world {world_id}: {first} chunks and {len(wanted)} more are above limits.max_chunks = {limit}; "
                    "rewind it, or fork it at an earlier chunk"
                )
            made = []
            for index, controls in enumerate(wanted, start=first):
                if index < len(live.stored.chunks):
                    _check_same(live, index, controls)  # the request has been heard before
                else:
                    await self._advance(live, controls, asked)
                made.append(live.chunk_view(index))
                asked = time.monotonic()
            recalled = live.stored.chunks[-1].fast_forward_k
            logger.info("%s: %d chunks, fast-forward %d of them", world_id, len(live.stored.chunks), recalled)
        if wait_for_frames:
            for view in made:
                await self._frames(live, view.chunk.key)
        return made

    async def _advance(self, live: LiveWorld, controls: ChunkControls, asked: float) -> None:
        """Make the path's next chunk, durably, and send it to the decoder."""
        while len(live.decodes) >= UNDECODED:
            await asyncio.wait(live.decodes.values(), return_when=asyncio.FIRST_COMPLETED)
        stored, key = live.stored, live.next_key(controls).hex()
        index, recalled = len(stored.chunks), stored.chunks[-1].fast_forward_k if stored.chunks else 0
        begun = time.monotonic()
        shared = await self._sharing.recall(key) if self._sharing is not None and stored.world.shared else None
        done: Done | None = None
        if shared is None:
            done = await self._call(live, controls)
            assert done.latents is not None
            entry = JournalEntry(controls, done.latents).to_bytes()
        else:
            entry = shared.entry
        await asyncio.to_thread(self._files.put, live.id, key, entry)
        if shared is not None and shared.frames is not None:
            await asyncio.to_thread(self._files.put_frames, live.id, key, shared.frames)
        chunk = Chunk(
            key=key,
            controls=controls.canonical().decode(),
            frames=pixel_frames(index, self._model(stored.world.model).services.stream.chunk),
            source="generated" if done else "cache",
            fast_forward_k=recalled + (done is None),
            restored=done.restored if done else None,
            replayed=done.replayed if done else 0,
            gang=done.gang if done else None,
            timings=Timings(waited=begun - asked, model=time.monotonic() - begun),
        )
        await self._write(live, self._store.append, stored, chunk, time.time())
        live.controls.append(controls)
        if shared is None or shared.frames is None:
            self._begin_decode(live, index)
        if done is not None:
            self._share(live)

    async def _call(self, live: LiveWorld, new: ChunkControls | None) -> Done:
        """The gang's part: catch up, and make the next chunk if there is to be one."""
        model, material = self._model(live.stored.world.model), await self._material(live)
        prompts = [live.stored.world.prompt, *(c.prompt for c in [*live.controls, new] if c is not None and c.prompt)]
        for prompt in dict.fromkeys(prompts):
            if prompt not in material.texts:
                material.texts[prompt] = await model.text(prompt)
        keys = live.keys

        def on_gang(name: str) -> None:
            live.gang = name

        return await model.call(
            session=live.id,
            world=material.world,
            known=list(live.controls),
            new=new,
            latents=lambda chunk: self._files.latents(live.id, keys[chunk]),
            texts=material.texts,
            gang=live.gang,
            on_gang=on_gang,
        )

    def _share(self, live: LiveWorld) -> None:
        sharing = self._sharing
        if sharing is None or not live.stored.world.shared:
            return
        keys, actions = live.keys, [controls.canonical() for controls in live.controls]

        async def share() -> None:
            async with live.sharing:
                await sharing.share(live.root, actions, lambda chunk: self._files.read(live.id, keys[chunk]))

        self._background.spawn(share())

    # --- frames ----------------------------------------------------------------------------------------------------

    def _begin_decode(self, live: LiveWorld, index: int) -> asyncio.Task[None]:
        key, keys = live.stored.chunks[index].key, live.keys[: index + 1]
        task = asyncio.get_running_loop().create_task(self._decode(live, keys), context=contextvars.Context())
        live.decodes[key] = task

        def ended(done: asyncio.Task[None]) -> None:
            live.decodes.pop(key, None)
            if not done.cancelled() and done.exception() is not None:
                logger.warning("%s: chunk %d is not decoded yet: %r", live.id, index, done.exception())

        task.add_done_callback(ended)
        return task

    async def _decode(self, live: LiveWorld, keys: Sequence[str]) -> None:
        """The last of these chunks to frames, after those before it."""
        world, model = live.stored.world, self._model(live.stored.world.model)
        vae, size = model.services.vae_of(world.id), model.services.stream.chunk
        before, key, position = keys[:-1], keys[-1], (len(keys) - 1) * size
        latents = await asyncio.to_thread(self._files.read, world.id, key)
        file = live.chunk_view(len(before)).file

        async def decode() -> dict[str, Any]:
            parent = before[-1] if before else world.root
            reply = await vae.decode.remote(world.id, parent, key, position, latents, None, world.fps, file)
            if reply["cold"]:
                warm = await asyncio.to_thread(self._files.warm_latents, world.id, before, size)
                reply = await vae.decode.remote(world.id, parent, key, position, latents, warm, world.fps, file)
            return dict(reply)

        async with live.decoding:
            reply = await model.until_done(decode, f"{world.id}: the decoder")
        logger.info("%s: chunk %d decoded in %.3f s", world.id, len(before), reply["seconds"])
        if self._sharing is not None and world.shared:
            self._background.spawn(self._share_frames(live, self._sharing, key))

    async def _share_frames(self, live: LiveWorld, sharing: ChunkSharing, key: str) -> None:
        try:
            await self._frames(live, key)
            frames = await asyncio.to_thread(self._files.read_frames, live.id, key)
        except (ApiError, OSError) as error:
            logger.info("%s: the frames of a chunk are not shared: %s", live.id, error)
            return
        async with live.sharing:
            await sharing.share_frames(key, frames)

    async def _decoded(self, live: LiveWorld, key: str) -> None:
        """Until a chunk has been decoded; now, if that was not to be or has failed."""
        task = live.decodes.get(key)
        if task is None and not await asyncio.to_thread(self._files.has_frames, live.id, key):
            if key not in live.keys:
                raise UnknownChunk(f"world {live.id}: the chunk was dropped by a rewind")
            task = self._begin_decode(live, live.keys.index(key))
        if task is not None:
            await task

    async def _frames(self, live: LiveWorld, key: str) -> None:
        """Until a chunk's frames are stored."""
        vae = self._model(live.stored.world.model).services.vae_of(live.id)
        for _ in range(self._config.max_attempts):
            await self._decoded(live, key)
            if await asyncio.to_thread(self._files.has_frames, live.id, key):
                return
            try:
                await vae.stored.remote(f"{live.id}/{key}.npz")
            except Exception as error:
                if not worker_was_lost(error):
                    raise
        if not await asyncio.to_thread(self._files.has_frames, live.id, key):
            raise ChunkFailed(f"world {live.id}: the frames of a chunk could not be stored")

    async def _images(self, live: LiveWorld, view: ChunkView, kind: ImageKind) -> list[bytes]:
        await self._decoded(live, view.chunk.key)
        model = self._model(live.stored.world.model)
        vae = model.services.vae_of(live.id)

        async def images() -> list[bytes]:
            try:
                return await vae.images.remote(view.file, kind)
            except Exception as error:
                if not isinstance(cause_of(error), ObjectNotFound):
                    raise
            await self._frames(live, view.chunk.key)  # its replica was lost before it had stored them
            return await vae.images.remote(view.file, kind)

        return await model.until_done(images, f"{live.id}: the decoder")

    # --- in hand ---------------------------------------------------------------------------------------------------

    def _model(self, name: str) -> ServedModel:
        if name not in self._models:
            raise WorldMovedOn(f"the world's model {name} is no longer served")
        return self._models[name]

    async def _find(self, world_id: str) -> LiveWorld:
        live = self._live.get(world_id)
        if live is None:
            try:
                stored = await asyncio.to_thread(self._store.get, world_id)
            except WorldNotFound as error:
                raise UnknownWorld(str(error)) from error
            live = self._live.setdefault(world_id, LiveWorld(stored))
        return live

    @asynccontextmanager
    async def _using(self, world_id: str) -> AsyncIterator[LiveWorld]:
        """The world, in its turn."""
        live = await self._find(world_id)
        live.users += 1
        try:
            async with live.turn:
                if live.deleted:
                    raise UnknownWorld(f"world {world_id} has been deleted")
                yield live
        finally:
            live.users -= 1
            live.used = time.monotonic()

    async def _material(self, live: LiveWorld) -> Material:
        if live.material is None:
            world = live.stored.world
            condition = await asyncio.to_thread(self._files.condition, world.id)
            gang_world = GangWorld(live.root, condition, world.prompt, world.seed, world.height, world.width)
            live.material = Material(gang_world)
        return live.material

    async def _check_room(self) -> None:
        if await asyncio.to_thread(self._store.count) >= self._config.max_worlds:
            raise WorldsFull(
                f"{self._config.max_worlds} worlds exist, as many as worlds.max_worlds allows; delete one", None, 60.0
            )

    async def _write(self, live: LiveWorld, write: Any, *arguments: Any) -> None:
        """In a thread; a world that another driver has changed is read again by whoever asks next."""
        try:
            await asyncio.to_thread(write, *arguments)
        except WorldTakenOver as error:
            self._live.pop(live.id, None)
            raise NotReady(str(error), None, 1.0) from error

    async def _park(self, live: LiveWorld) -> None:
        async with live.turn:
            await self._let_go(live)

    async def _let_go(self, live: LiveWorld) -> None:
        """Drop what need not be kept, here and on the replicas; those that are away have dropped it."""
        services = self._model(live.stored.world.model).services
        gang, live.gang, live.material = live.gang, "", None
        try:
            async with asyncio.timeout(AWAY_S):
                if gang:
                    await park(services.gang, live.id, gang, services.card.topology.pp)
                await services.vae_of(live.id).forget.remote(live.id)
        except Exception as error:
            if not worker_was_lost(error) and not isinstance(error, TimeoutError):
                raise
            logger.info("%s: parked while a worker was away: %r", live.id, error)

    async def _park_idle(self) -> None:
        while True:
            await asyncio.sleep(PARK_LOOK_S)
            now = time.monotonic()
            for live in list(self._live.values()):
                model = self._models.get(live.stored.world.model)
                idle = live.users == 0 and not live.decodes and not live.turn.locked()
                if model is None or not idle or now - live.used < model.services.sessions.park_after_s:
                    continue
                if live.gang or live.material is not None:
                    await self._park(live)
                    logger.info("%s: parked after %.0f s without use", live.id, now - live.used)
                if live.users == 0 and not live.turn.locked():
                    self._live.pop(live.id, None)


async def _apart(call: Coroutine[Any, Any, T]) -> T:
    """Run `call` to its end even when its caller goes away, and outside the context by which Serve would take the
    calls of one request for each other.  Raises NotReady where the storage is away."""
    try:
        return await asyncio.shield(asyncio.get_running_loop().create_task(call, context=contextvars.Context()))
    except StorageUnavailable as error:
        raise NotReady(f"the storage of worlds is away: {error}", None, 5.0) from error


def _chunk(live: LiveWorld, index: int) -> ChunkView:
    if not 0 <= index < len(live.stored.chunks):
        raise UnknownChunk(f"chunk: got {index}, world {live.id} has {len(live.stored.chunks)} chunks", "chunk")
    return live.chunk_view(index)


def _check_boundary(live: LiveWorld, chunks: int) -> None:
    if not 0 <= chunks <= len(live.stored.chunks):
        raise WorldMovedOn(f"chunks: got {chunks}, world {live.id} has {len(live.stored.chunks)}", "chunks")


def _check_same(live: LiveWorld, index: int, controls: ChunkControls) -> None:
    if live.stored.chunks[index].controls != controls.canonical().decode():
        raise WorldMovedOn(
            f"after: world {live.id} has a chunk {index} already, made with other controls; rewind it first, or fork",
            "after",
        )
