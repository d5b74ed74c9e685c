"""Frames over HTTP, and the frames they must equal."""

from __future__ import annotations

import io
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch
from diffusers import WanPipeline

from deployments.wan.decoder import use_onednn


def make(client: httpx.Client, **fields: Any) -> np.ndarray:
    """A job that asks for its raw frames; [F, H, W, 3] uint8."""
    job = create(client, outputs=["frames"], **fields)
    return frames(client, job)


def create(client: httpx.Client, **fields: Any) -> str:
    """The id of a new job of model `tiny`, unless told otherwise."""
    answer = client.post("/v1/videos", json={"model": "tiny", "prompt": "a red circle moving left", **fields})
    assert answer.status_code == 200, answer.text
    job_id: str = answer.json()["id"]
    return job_id


def frames(client: httpx.Client, job_id: str) -> np.ndarray:
    """Of a job, once it is completed."""
    job = finish(client, job_id)
    assert job["status"] == "completed", job["error"]
    content = client.get(f"/v1/videos/{job_id}/content", params={"variant": "frames"}).raise_for_status().content
    found: np.ndarray = np.load(io.BytesIO(content))["frames"]
    return found


def finish(client: httpx.Client, job_id: str) -> dict[str, Any]:
    """The job once it is final."""
    with client.stream("GET", f"/v1/videos/{job_id}/events", timeout=120) as stream:
        for _ in stream.iter_lines():
            pass
    job: dict[str, Any] = client.get(f"/v1/videos/{job_id}").json()
    assert job["status"] in ("completed", "failed", "cancelled")
    return job


@cache
def _pipeline(checkpoint: Path) -> WanPipeline:
    # fp32 throughout: the test models ask for it, and the decoder's default is fp32.
    pipeline = WanPipeline.from_pretrained(checkpoint, torch_dtype=torch.float32)
    use_onednn(pipeline.vae)  # as the served decoder on a CPU: torch's own choice of kernel rounds otherwise
    return pipeline


def expected(checkpoint: Path, *, seed: int, prompt: str = "a red circle moving left", **fields: Any) -> np.ndarray:
    """What diffusers' own pipeline makes of the same request; [F, H, W, 3] uint8."""
    values = {"width": 64, "height": 48, "num_frames": 9, "num_inference_steps": 4, "guidance_scale": 5.0, **fields}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in the test models: more threads would split sums elsewhere
    try:
        video = _pipeline(checkpoint)(
            prompt=prompt,
            negative_prompt="",
            max_sequence_length=16,
            generator=torch.Generator("cpu").manual_seed(seed),
            output_type="np",
            **values,
        ).frames[0]
    finally:
        torch.set_num_threads(threads)
    found: np.ndarray = (video * 255).round().astype(np.uint8)
    return found
