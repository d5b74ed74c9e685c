"""What decides a world's pixels, gathered for its root key."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version

import torch
from torch import Tensor

from cache_actors.keys import WorldMaterial, image_digest
from deployments.lingbot.camera_path import CAMERA_VERSION, CameraPolicy
from deployments.lingbot.condition import RESIZE_RULE
from deployments.lingbot.controls import CONTROLS_VERSION
from deployments.lingbot.noise import NOISE_VERSION
from deployments.lingbot.stream_config import StreamConfig


def world_material(
    fingerprints: Mapping[str, str],
    stream: StreamConfig,
    camera: CameraPolicy,
    *,
    device: torch.device,
    dtype: torch.dtype,
    vae_dtype: torch.dtype,
    max_prompt_tokens: int,
    image: Tensor,
    prompt: str,
    seed: int,
    height: int,
    width: int,
) -> WorldMaterial:
    """fingerprints: of `checkpoint.world_fingerprints`.  device: where stages and VAE run.  dtype: of the stages.

    max_prompt_tokens: the model's text_len.  image: [H, W, 3] uint8 RGB as given.  prompt: cleaned.
    height, width: pixels of the world.
    """
    return WorldMaterial(
        transformer=fingerprints["transformer"],
        vae=fingerprints["vae"],
        text_encoder=fingerprints["text_encoder"],
        adapters=(),
        quantization="none",
        timesteps=stream.sampler.timesteps,
        sigma_x0=stream.sampler.sigma_x0,
        sigma_noise=stream.sampler.sigma_noise,
        clean_pass=True,
        chunk=stream.chunk,
        window=stream.window,
        sink=stream.sink,
        height=height,
        width=width,
        weight_dtype=_name(dtype),
        residual_dtype="float32",
        kv_dtype=_name(dtype),
        vae_dtype=_name(vae_dtype),
        attention="torch scaled_dot_product_attention",
        compiled=False,
        sequence_parallel=1,
        tensor_parallel=1,
        device=device_name(device),
        software=", ".join(f"{name} {version(name)}" for name in ("torch", "diffusers", "transformers", "numpy")),
        image=image_digest(image.contiguous().numpy().tobytes(), image.shape[0], image.shape[1]),
        resize=RESIZE_RULE,
        prompt=prompt,
        max_prompt_tokens=max_prompt_tokens,
        seed=seed,
        noise_version=NOISE_VERSION,
        camera_version=CAMERA_VERSION,
        controls_version=CONTROLS_VERSION,
        move_step=camera.move_step,
        turn_step=camera.turn_step,
        pitch_limit=camera.pitch_limit,
        translation_scale=camera.translation_scale,
        intrinsics=camera.intrinsics,
    )


def device_name(device: torch.device) -> str:
    """The kind of device that gives the same bits: a GPU's product and libraries, a CPU's vector units."""
    if device.type == "cuda":
        libraries = f"CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}"
        return f"{torch.cuda.get_device_name(device)}, {libraries}"
    return f"CPU {torch.backends.cpu.get_cpu_capability()}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
