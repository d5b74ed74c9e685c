"""What a served request costs beside its steps."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

import torch

from app.jobs.calibrate.studio import Studio
from app.jobs.prompt_set import Video
from deployments.video_file import video_mp4
from deployments.wan.decoder import VideoDecoder
from deployments.wan.memory_plan import DTYPES
from deployments.wan.text_encoder import TextEncoder


@dataclass(frozen=True)
class OtherSeconds:
    """A `Task`: text encoding, decoding by the served decoder, and the mp4 of one video, once warm."""

    video: Video

    def __call__(self, studio: Studio) -> float:
        """Seconds."""
        folder, clip = studio.checkpoint.folder, studio.spec.clip
        encoder = TextEncoder(folder, DTYPES[studio.spec.dtype], studio.device)
        decoder = VideoDecoder(folder, torch.float32, studio.device)
        _, latents = studio.native(self.video)
        seconds = 0.0
        for _ in range(2):  # the first is the warm-up
            began = time.perf_counter()
            encoder.encode(self.video.prompt, clip.negative_prompt, clip.max_sequence_length)
            video_mp4(decoder.decode(latents, threading.Event()), clip.fps)
            seconds = time.perf_counter() - began
        return seconds
