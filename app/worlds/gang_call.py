"""One request of a world to a gang: ask what the gang has, plan, run, and again where the answer was out of date."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ray.serve.handle import DeploymentHandle
from safetensors.torch import load, save
from torch import Tensor

from app.planning.world_plan import world_plan
from app.planning.world_task import task_tensors, world_task
from cache_actors.keys import path_keys
from deployments.gang.gang_lost import GangLost
from deployments.lingbot.camera_path import CameraPolicy, CameraState
from deployments.lingbot.controls import ChunkControls
from deployments.lingbot.fast_forward import ChunkCosts
from deployments.lingbot.session import World
from deployments.lingbot.stream_config import StreamConfig
from deployments.lingbot.world_plan import WorldPlan
from deployments.lingbot.world_replica import Window
from deployments.lingbot.world_task import WorldTask

STALE_TRIES = 50
STALE_PAUSE_S = 0.1
"""A gang answers stale while another request of the world, such as one of a driver that died, is not over."""


@dataclass(frozen=True)
class Done:
    """What a request gave."""

    latents: Tensor | None
    """[1, C, c, h, w] fp32 of the chunk that was made, on the CPU; None where none was wanted."""
    plan: WorldPlan
    gang: str
    device: str
    seconds: float

    @property
    def restored(self) -> int | None:
        """The window was restored after so many chunks; None: it was not."""
        return next((one.chunk for one in self.plan.passes if one.op == "restore"), None)

    @property
    def replayed(self) -> int:
        """Chunks that were replayed by their clean pass alone."""
        made = {one.chunk for one in self.plan.passes if one.op == "denoise"}
        return sum(one.op == "clean" and one.chunk not in made for one in self.plan.passes)


@dataclass(frozen=True)
class GangCall:
    """Everything a request needs; `run` may be called again after a loss.

    known: controls of the chunks whose latents exist.  new: of the chunk to be made; None only brings the window to the
    path's end.  latents: reads a known chunk's latents.  texts: embeddings of every prompt on the path.
    """

    handle: DeploymentHandle
    stream: StreamConfig
    policy: CameraPolicy
    stages: int
    costs: ChunkCosts
    session: str
    world: World
    known: Sequence[ChunkControls]
    new: ChunkControls | None
    latents: Callable[[int], Tensor]
    texts: dict[str, Tensor]

    async def run(self, gang: str, on_gang: Callable[[str], None]) -> Done:
        """gang: asked first, empty for any.  on_gang: told who has taken the request.

        Raises what went wrong; `failure.worker_was_lost` tells whether another attempt makes sense.
        """
        keys = [key.hex() for key in path_keys(self.world.root, [c.canonical() for c in self.known])]
        for _ in range(STALE_TRIES):
            window: Window = await self.handle.options(session_id=f"{self.session}|{gang}").window.remote(
                self.session, keys
            )
            gang = window["gang"]
            plan = world_plan(
                stages=self.stages,
                stream=self.stream,
                costs=self.costs,
                live=window["live"],
                kept=window["kept"],
                generate=0 if self.new is None else 1,
            )
            if not plan.passes:
                if window["live"]:
                    on_gang(gang)
                return Done(None, plan, gang, window["device"], 0.0)
            event = await self._generate(gang, plan, window, on_gang)
            if not event["ranks"][0]["stale"]:
                latents = None if self.new is None else load(await event["latents"][0])["latents"]
                return Done(latents, plan, gang, window["device"], event["seconds"])
            await asyncio.sleep(STALE_PAUSE_S)
        raise GangLost(f"world {self.session}: the gang has answered stale {STALE_TRIES} times")

    async def _generate(
        self, gang: str, plan: WorldPlan, window: Window, on_gang: Callable[[str], None]
    ) -> dict[str, Any]:
        path = [*self.known, *([] if self.new is None else [self.new])]
        task = world_task(self.session, self.world, path, plan, live=window["live"], policy=self.policy)
        blob = await asyncio.to_thread(self._blob, task, window["prompts"] if task.live else [])
        name = task.keys[-1] if task.keys else "start"
        stream = self.handle.options(stream=True, session_id=f"{self.session}|{gang}").generate.remote(
            f"{self.session}/{name}/{'' if self.new is None else 'new'}",
            {"task": task.to_json()},
            [blob],
            0,
            len(plan.passes),
            plan.digest,
        )
        try:
            async for event in stream:
                if event["kind"] == "accepted":
                    on_gang(event["gang"])
                elif event["kind"] == "result":
                    return event
        finally:
            stream.cancel()
        raise GangLost("the gang ended its stream without a result")

    def _blob(self, task: WorldTask, kept: Sequence[str]) -> bytes:
        """What the gang does not have yet; kept: prompts whose embeddings it has, and with any of them the condition.

        At 480p the condition is 15 MB: sent with every chunk it would cost a tenth of a second.
        """
        tensors = task_tensors(task, self.world.condition, self.texts.__getitem__, _Lazy(self.latents))
        known = {f"text.{number}" for number, prompt in enumerate(task.prompts) if prompt in kept}
        known |= {"condition"} if kept else set()
        return save({name: x.contiguous() for name, x in tensors.items() if name not in known})


class _Lazy(dict[int, Tensor]):
    """Latents by chunk, read when they are asked for."""

    def __init__(self, read: Callable[[int], Tensor]) -> None:
        super().__init__()
        self._read = read

    def __missing__(self, chunk: int) -> Tensor:
        return self._read(chunk)


async def park(handle: DeploymentHandle, session: str, gang: str, stages: int) -> None:
    """Let a gang drop what it has of a world, keys and values of finished chunks aside."""
    plan = WorldPlan(stages, (), 0)
    task = WorldTask(
        world=session,
        plan=plan,
        seed=0,
        height=0,
        width=0,
        live=0,
        keys=(),
        first=0,
        chunks=(),
        camera=CameraState(),
        prompts=(),
    )
    stream = handle.options(stream=True, session_id=f"{session}|{gang}").generate.remote(
        f"{session}/park", {"task": task.to_json()}, [], 0, 0, plan.digest
    )
    async for _ in stream:
        pass
