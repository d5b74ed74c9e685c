"""Native and cached runs of the same videos, timed as whole requests, alternating in one loaded gang.

    pair 0   native cached      pair 1   cached native      pair 2   native cached      ...

so that a drift of the machine hits both sides alike.  A whole request is text encoding, every step, decoding and the
mp4.  Timed runs carry host counters only; comparing the two videos happens after the clock has stopped.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from app.jobs.clip_settings import ClipSettings
from app.jobs.local_gang import LocalGang
from app.jobs.prompt_set import Video
from app.jobs.video_pair import Frames, Side, TimedPair, compare
from deployments.stage_cache.selection import HitCount
from deployments.video_file import video_mp4
from deployments.wan.checkpoint import WanCheckpoint
from deployments.wan.decoder import VideoDecoder
from deployments.wan.text_encoder import TextEncoder


@dataclass(frozen=True)
class Run:
    """One timed request."""

    side: Side
    frames: Frames
    latents: Tensor
    """[1, C, F, H, W] fp32."""
    ranks: list[dict[str, Any]]
    """What each rank reports."""


@dataclass(frozen=True)
class PairedRun:
    """Both requests of one video."""

    pair: TimedPair
    native: Run
    cached: Run

    @property
    def trips(self) -> int:
        """1 if a guard ended the reuse of the cached run."""
        return int(self.cached.ranks[0]["native"] is not None)

    def hits(self) -> list[HitCount]:
        """Reused steps of the cached run by stage and branch."""
        return [
            HitCount(stage=report["stage"], branch=branch, hits=count["reuse"])
            for report in self.cached.ranks
            for branch, count in report["branches"].items()
        ]


class PairedRuns:
    """One gang with its text encoder and decoder, all loaded."""

    def __init__(
        self,
        gang: LocalGang,
        topology: tuple[int, int],
        checkpoint: WanCheckpoint,
        clip: ClipSettings,
        encoder: TextEncoder,
        decoder: VideoDecoder,
    ) -> None:
        """topology: pp and cfg of the gang."""
        self._gang, self._checkpoint, self._clip = gang, checkpoint, clip
        self._pp, self._cfg = topology
        self._encoder, self._decoder = encoder, decoder

    def pairs(self, videos: Sequence[Video], reuse: Sequence[int], first: int = 0) -> Iterator[PairedRun]:
        """One pair a video, after a native and a cached warm-up.  first: number of the first pair, for the order."""
        for warm_up in ((), reuse):
            self._run(videos[0], warm_up)
        for number, video in enumerate(videos, start=first):
            native_first = number % 2 == 0
            if native_first:
                native, cached = self._run(video, ()), self._run(video, reuse)
            else:
                cached, native = self._run(video, reuse), self._run(video, ())
            quality = compare(video, (native.frames, native.latents), (cached.frames, cached.latents))
            pair = TimedPair(quality=quality, native=native.side, cached=cached.side, native_first=native_first)
            yield PairedRun(pair, native, cached)

    def _run(self, video: Video, reuse: Sequence[int]) -> Run:
        clip = self._clip
        began = time.perf_counter()
        plan = clip.plan(self._checkpoint, self._pp, self._cfg, reuse)
        text = self._encoder.encode(video.prompt, clip.negative_prompt, clip.max_sequence_length)
        encoded = time.perf_counter()
        result = self._gang.run(clip.task(self._checkpoint, video.name, video.seed, plan), text)
        denoised = time.perf_counter()
        frames = self._decoder.decode(result.latents, threading.Event())
        decoded = time.perf_counter()
        video_mp4(frames, clip.fps)
        ended = time.perf_counter()
        side = Side(
            total=ended - began,
            text=encoded - began,
            denoise=denoised - encoded,
            decode=decoded - denoised,
            file=ended - decoded,
        )
        return Run(side, frames, result.latents, result.ranks)
