"""The request that shows a world model can work, and what each way to a chunk costs there.

Two chunks are generated, then brought back in both ways, and decoded: through the text encoder, the VAE and every rank.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from dataclasses import replace

import numpy as np
from safetensors.torch import load, save
from torch import Tensor

from app.api.video_jobs import Readiness
from app.driver.background import Background
from app.driver.failure import cause_of, worker_was_lost
from app.worlds.gang_call import Done, park
from app.worlds.journal_files import JournalFiles, frames_file
from app.worlds.served_model import RETRY_PAUSE_S, ServedModel
from deployments.lingbot.controls import ChunkControls, Keys, key_frames
from deployments.lingbot.fast_forward import ChunkCosts
from deployments.lingbot.session import World
from deployments.lingbot.stream_config import fit_size

NEVER = float("inf")

logger = logging.getLogger("ray.serve")


class WorldReadiness:
    """Runs warm-ups until one has ended well, and again after a loss."""

    def __init__(self, model: ServedModel, files: JournalFiles, background: Background) -> None:
        self._model, self._files, self._background = model, files, background
        self._reason = "warming up: no chunk has run through every rank yet"
        model.on_loss = self._worker_lost
        background.spawn(self._warm_up())

    def state(self) -> Readiness:
        """Now."""
        return Readiness(ready=not self._reason, reason=self._reason)

    async def _warm_up(self) -> None:
        name = self._model.services.card.name
        while True:
            try:
                await warm_up(self._model, self._files)
            except Exception as error:  # noqa: BLE001  whatever keeps it from working is told by /ready, and tried again
                logger.warning("warm-up of model %s: %r", name, error)
                self._reason = f"warming up; the last try ended with {cause_of(error)!r}"[:500]
                await asyncio.sleep(RETRY_PAUSE_S)
            else:
                break
        self._reason = ""
        logger.info("model %s is ready: %s", name, self._model.costs)

    def _worker_lost(self) -> None:
        """Not ready until every service answers again; with several gangs the others go on meanwhile."""
        if not self._reason and self._model.services.card.topology.gangs == 1:
            self._reason = "a worker was lost: waiting for another one"
            self._background.spawn(self._wait_for_workers())

    async def _wait_for_workers(self) -> None:
        while True:
            await asyncio.sleep(RETRY_PAUSE_S)
            try:
                await self._model.services.numerics()
            except Exception as error:
                if not worker_was_lost(error):
                    raise
            else:
                break
        self._reason = ""


async def warm_up(model: ServedModel, files: JournalFiles) -> None:
    """Run one and keep its costs; nothing of it stays.  Raises what went wrong."""
    services, session = model.services, f"warm-up-{secrets.token_hex(6)}"
    try:
        await _Rehearsal(model, files, session).run()
    finally:
        await asyncio.to_thread(files.drop_world, session)
        await services.vae_of(session).forget.remote(session)


class _Rehearsal:
    def __init__(self, model: ServedModel, files: JournalFiles, session: str) -> None:
        self._model, self._files, self._session = model, files, session
        self._stream = model.services.stream
        self._known: list[ChunkControls] = []
        self._latents: list[Tensor] = []
        self._gang = ""

    async def run(self) -> None:
        services = self._model.services
        height, width = fit_size(services.card.default_pixels, 480, 832)
        gray = np.full((height, width, 3), 128, np.uint8)
        condition = load(await services.vae_of(self._session).condition.remote(gray, height, width))["condition"]
        self._texts = {"": await self._model.text("")}
        self._world = World(secrets.token_bytes(32), condition, "", 0, height, width)
        usual = self._model.costs
        generate = 0.0
        for chunk in range(2):
            controls = ChunkControls(Keys((frozenset("w"),) * key_frames(chunk, self._stream.chunk)))
            done = await self._call(controls, usual)
            assert done.latents is not None
            self._known.append(controls)
            self._latents.append(done.latents)
            generate = done.seconds
        replay = await self._back(replace(usual, restore=NEVER))
        restore = await self._back(replace(usual, restore=0.0))
        decode = 0.0
        for chunk in range(2):
            decode = await self._decode(chunk)
        self._model.costs = ChunkCosts(
            generate=generate,
            clean=replay.seconds / 2,
            restore=restore.seconds / 2 if restore.restored else NEVER,
            decode=decode,
            frames=0.01,  # a read of a file
        )
        self._model.measured = True
        await park(services.gang, self._session, self._gang, services.card.topology.pp)

    async def _back(self, costs: ChunkCosts) -> Done:
        services = self._model.services
        await park(services.gang, self._session, self._gang, services.card.topology.pp)
        return await self._call(None, costs)

    async def _call(self, new: ChunkControls | None, costs: ChunkCosts) -> Done:
        def on_gang(name: str) -> None:
            self._gang = name

        return await self._model.call(
            session=self._session,
            world=self._world,
            known=self._known,
            new=new,
            latents=self._latents.__getitem__,
            texts=self._texts,
            gang=self._gang,
            on_gang=on_gang,
            costs=costs,
        )

    async def _decode(self, chunk: int) -> float:
        blob = save({"latents": self._latents[chunk]})
        names, position = [str(n) for n in range(3)], chunk * self._stream.chunk
        file = frames_file(self._session, names[chunk + 1])
        vae, fps = self._model.services.vae_of(self._session), self._model.services.card.fps
        decoded = await vae.decode.remote(
            self._session, names[chunk], names[chunk + 1], position, blob, None, fps, file
        )
        await vae.stored.remote(file)
        return float(decoded["seconds"])
