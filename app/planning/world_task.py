"""A world's path and a plan become the `WorldTask` and the tensors that a gang is given."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from cache_actors.keys import path_keys
from deployments.lingbot.camera_path import CameraPolicy, CameraState, advance_camera
from deployments.lingbot.controls import ChunkControls
from deployments.lingbot.session import World
from deployments.lingbot.world_plan import WorldPlan
from deployments.lingbot.world_task import ChunkTask, WorldTask


def world_task(
    session: str,
    world: World,
    path: Sequence[ChunkControls],
    plan: WorldPlan,
    *,
    live: int,
    policy: CameraPolicy,
) -> WorldTask:
    """path: controls of the world's known chunks and of those that the plan makes.

    live: chunks in the gang's window when it was asked; a plan that begins with a restore does without them.
    """
    computed = [one.chunk for one in plan.passes if one.op == "clean"]
    first = computed[0] if computed else len(path)
    prompts, prompt_of = [world.prompt], [0]
    for controls in path:
        if controls.prompt is not None and controls.prompt not in prompts:
            prompts.append(controls.prompt)
        prompt_of.append(prompt_of[-1] if controls.prompt is None else prompts.index(controls.prompt))
    return WorldTask(
        world=session,
        plan=plan,
        seed=world.seed,
        height=world.height,
        width=world.width,
        live=0 if plan.passes and plan.passes[0].op == "restore" else live,
        keys=tuple(key.hex() for key in path_keys(world.root, [c.canonical() for c in path])),
        first=first,
        chunks=tuple(
            ChunkTask(controls.canonical().decode(), prompt)
            for controls, prompt in zip(path[first:], prompt_of[first + 1 :], strict=True)
        ),
        camera=camera_after(path[:first], policy),
        prompts=tuple(prompts),
    )


def task_tensors(
    task: WorldTask,
    condition: Tensor,
    encode_text: Callable[[str], Tensor],
    known: Mapping[int, Tensor] | Sequence[Tensor],
) -> dict[str, Tensor]:
    """What goes with a task.

    condition: [4 + C, 31, h, w].  encode_text: a cleaned prompt to [n, text_dim].
    known: latents [1, C, c, h, w] by chunk, those that the plan replays at least.
    """
    replayed = _replayed(task.plan)
    return {
        "condition": condition,
        **{f"text.{number}": encode_text(prompt) for number, prompt in enumerate(task.prompts)},
        **{f"latents.{chunk}": known[chunk] for chunk in replayed},
    }


def camera_after(path: Sequence[ChunkControls], policy: CameraPolicy) -> CameraState:
    """Where the camera is after these chunks, a world's first ones."""
    camera = CameraState()
    for chunk, controls in enumerate(path):
        camera = advance_camera(camera, controls, chunk == 0, policy)[1]
    return camera


def _replayed(plan: WorldPlan) -> list[int]:
    """Chunks with a clean pass and no denoise pass."""
    made = {one.chunk for one in plan.passes if one.op == "denoise"}
    return [one.chunk for one in plan.passes if one.op == "clean" and one.chunk not in made]
