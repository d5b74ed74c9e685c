"""One served world model: its place for requests, its gangs' losses, its measured costs."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import fields, replace
from typing import TypeVar

import torch
from safetensors.torch import load
from torch import Tensor

from app.api.errors import ApiError, NotReady
from app.api.world_errors import ChunkFailed, WorldMovedOn, WorldsFull
from app.driver.failure import cause_of, worker_was_lost
from app.worlds.gang_call import Done, GangCall
from app.worlds.model_services import WorldServices
from app.worlds.world_state import World as OpenWorld
from cache_actors.keys import WorldMaterial
from deployments.lingbot.controls import ChunkControls
from deployments.lingbot.fast_forward import ChunkCosts
from deployments.lingbot.session import World
from deployments.lingbot.world_key import world_material
from deployments.wan.memory_plan import DTYPES

RETRY_PAUSE_S = 1.0
"""Serve notices a death and routes around it within this order of time."""
RECOVERY_S = 300.0
"""Longest wait for a gang that is being replaced: it loads tens of gigabytes."""
FIRST_RETRY_S = 2.0
"""Told to a refused client while nothing is known of the model's speed."""

CPU = torch.device("cpu")
NO_IMAGE = torch.zeros(1, 1, 3, dtype=torch.uint8)

T = TypeVar("T")

logger = logging.getLogger("ray.serve")


class ServedModel:
    """Belongs to one event loop."""

    def __init__(self, services: WorldServices, max_waiting: int, max_attempts: int) -> None:
        self.services = services
        self._max_waiting, self._max_attempts = max_waiting, max_attempts
        topology = services.card.topology
        self._capacity = topology.gangs * topology.requests_in_flight
        self._places = asyncio.Semaphore(self._capacity)
        self._requests = 0
        self.costs = ChunkCosts(generate=services.stream.forwards, clean=1, restore=0.5, decode=1, frames=0.1)
        """Relative until a warm-up has measured them, in seconds afterwards."""
        self.measured = False
        self._device = self._numerics = ""
        """Kind of the gang's device, and of all devices that take part in a world's pixels."""
        self.on_loss: Callable[[], None] = lambda: None
        """Called whenever a worker was lost."""

    @asynccontextmanager
    async def request(self) -> AsyncIterator[None]:
        """A request for chunks, from its acceptance to its end.  Raises WorldsFull when too many wait."""
        if self._requests >= self._capacity + self._max_waiting:
            seconds = self.costs.generate if self.measured else FIRST_RETRY_S
            raise WorldsFull(
                f"model {self.services.card.name}: {self._requests} requests are at work or wait, as many as "
                "worlds.max_waiting allows",
                retry_after_s=seconds * self._requests / self._capacity,
            )
        self._requests += 1
        try:
            yield
        finally:
            self._requests -= 1

    async def material(
        self, *, image: str, prompt: str, seed: int, width: int, height: int, refresh: bool = False
    ) -> WorldMaterial:
        """What a world's root key covers, with this model as it is served now.  image: its digest (hex).

        refresh: ask the replicas again for their devices.
        """
        await self._identify(refresh)
        services = self.services
        material = world_material(
            services.fingerprints,
            services.stream,
            services.camera,
            device=CPU,
            dtype=DTYPES[services.card.dtype],
            vae_dtype=DTYPES[services.vae_dtype],
            max_prompt_tokens=services.max_prompt_tokens,
            image=NO_IMAGE,
            prompt=prompt,
            seed=seed,
            height=height,
            width=width,
        )
        # The devices of the processes that compute, not of this one.
        return replace(material, image=image, device=self._numerics)

    async def check(self, world: OpenWorld) -> None:
        """Raises WorldMovedOn where the model would not make the bits that the world's keys stand for."""
        now = await self.material(
            image=world.image, prompt=world.prompt, seed=world.seed, width=world.width, height=world.height
        )
        if now.canonical().decode() != world.material:
            then = WorldMaterial.from_canonical(world.material.encode())
            changed = [f.name for f in fields(now) if getattr(now, f.name) != getattr(then, f.name)]
            raise WorldMovedOn(
                f"world {world.id}: model {world.model} is not what it was when the world was opened "
                f"({', '.join(changed)}); open the world again to have it made by the model of today"
            )

    async def text(self, prompt: str) -> Tensor:
        """Embeddings [n, text_dim] of a cleaned prompt; a lost encoder is waited for."""

        async def encode() -> Tensor:
            return load(await self.services.text_encoder.encode.remote(prompt))["text"]

        return await self.until_done(encode, "the text encoder")

    async def call(
        self,
        *,
        session: str,
        world: World,
        known: Sequence[ChunkControls],
        new: ChunkControls | None,
        latents: Callable[[int], Tensor],
        texts: dict[str, Tensor],
        gang: str,
        on_gang: Callable[[str], None],
        costs: ChunkCosts | None = None,
    ) -> Done:
        """As `GangCall`, on any gang that can: a lost one costs a replay elsewhere.  Raises ChunkFailed, NotReady."""
        services = self.services
        request = GangCall(
            handle=services.gang,
            stream=services.stream,
            policy=services.camera,
            stages=services.card.topology.pp,
            costs=costs or self.costs,
            session=session,
            world=world,
            known=known,
            new=new,
            latents=latents,
            texts=texts,
        )
        pinned, taken = gang, 0

        def placed(name: str) -> None:
            nonlocal pinned, taken
            pinned, taken = name, taken + 1
            on_gang(name)

        async def run() -> Done:
            if taken >= self._max_attempts:
                raise ChunkFailed(f"{taken} gangs broke with this chunk in a row (worlds.max_attempts)")
            done = await request.run(pinned, placed)
            if done.device != self._device:
                raise ChunkFailed(f"gang {done.gang} runs on {done.device}, other gangs of the model on {self._device}")
            return done

        await self._identify()
        async with self._places:
            return await self.until_done(run, f"world {session}: a gang")

    async def _identify(self, refresh: bool = False) -> None:
        if refresh or not self._numerics:
            self._device, self._numerics = await self.until_done(self.services.numerics, "the model")

    async def until_done(self, work: Callable[[], Awaitable[T]], what: str) -> T:
        """`work`, again after every loss of a worker, for as long as workers can be expected back.

        Raises NotReady after that, ChunkFailed for what no other worker would do better.
        """
        deadline = time.monotonic() + RECOVERY_S
        while True:
            try:
                async with asyncio.timeout(deadline - time.monotonic()):
                    return await work()
            except ApiError:
                raise
            except TimeoutError as error:
                raise NotReady(f"{what} did not come back within {RECOVERY_S:g} s", None, RETRY_PAUSE_S) from error
            except Exception as error:
                cause = cause_of(error)
                if not worker_was_lost(error):
                    logger.exception("%s failed", what)
                    raise ChunkFailed(f"{what} failed: {type(cause).__name__}: {cause}") from error
                logger.warning("%s was lost: %r", what, cause)
                self.on_loss()
                await asyncio.sleep(RETRY_PAUSE_S)
