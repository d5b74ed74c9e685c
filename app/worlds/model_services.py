"""One served world model as the driver sees it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ray.serve.handle import DeploymentHandle

from app.config import WorldSessions
from app.worlds.world_card import WorldCard
from deployments.lingbot.camera_path import CameraPolicy
from deployments.lingbot.stream_config import StreamConfig


@dataclass(frozen=True)
class WorldServices:
    """The model's facts and the deployments that do its work."""

    card: WorldCard
    fingerprints: dict[str, str]
    """Of `checkpoint.world_fingerprints`."""
    stream: StreamConfig
    camera: CameraPolicy
    vae_dtype: str
    max_prompt_tokens: int
    sessions: WorldSessions
    text_encoder: DeploymentHandle
    vae: DeploymentHandle
    gang: DeploymentHandle

    def vae_of(self, world: str) -> DeploymentHandle:
        """The VAE replica that has a world's decoder state, if any has."""
        return self.vae.options(session_id=world)

    async def numerics(self) -> tuple[str, str]:
        """Kind of the gang's device, and of all devices that take part in a world's pixels together."""
        window: dict[str, Any] = await self.gang.options(session_id="").window.remote("", [])
        vae, text = await self.vae_of("").device.remote(), await self.text_encoder.device.remote()
        return window["device"], f"gang: {window['device']}; vae: {vae}; text: {text}"
