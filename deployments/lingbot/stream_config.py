"""How a world is cut into chunks, what a chunk may look back at, and the arithmetic of frames, chunks and sizes."""

from __future__ import annotations

from dataclasses import dataclass
from math import isqrt
from typing import Literal

from deployments.lingbot.sampler_tables import V1_FAST, V2_1_3B, V2_14B, SamplerTable

Layout = Literal["v1-fast", "v2-14b", "v2-1.3b"]
"""The releases that are served."""

PATCH = (1, 2, 2)
"""Latent frames, rows and columns of a token; the same in every release."""

VAE_STRIDE = 8
"""Pixels along one side of a latent."""

FRAMES_PER_LATENT = 4
"""Pixel frames of a latent frame; the first latent frame of a world gives one."""

WARM_LATENTS = 40
"""Latents that rebuild the VAE decoder's state: 38, rounded up to a safe number that divides well."""

PIXEL_MULTIPLE = VAE_STRIDE * PATCH[1]
"""Heights and widths are multiples of it."""


@dataclass(frozen=True)
class StreamConfig:
    """Chunking, window and sampler of a served world model.  Lengths in latent frames."""

    chunk: int
    window: int
    """Frames of keys and values that a chunk attends to, itself and the sink included; -1: all, so state grows."""
    sink: int
    """First frames of the world, which stay in the window for ever."""
    sampler: SamplerTable
    fps: int = 16

    def __post_init__(self) -> None:
        if self.chunk < 1:
            raise ValueError(f"chunk: got {self.chunk}, expected at least 1 latent frame")
        if self.window == -1:
            if self.sink != 0:
                raise ValueError(f"sink: got {self.sink} with window -1, expected 0: nothing is ever evicted")
        elif not 0 <= self.sink <= self.window - self.chunk:
            raise ValueError(
                f"window: got {self.window} with sink {self.sink} and chunk {self.chunk}, expected -1 or at least "
                f"sink + chunk = {self.sink + self.chunk}: otherwise a chunk would overwrite the sink"
            )

    @property
    def forwards(self) -> int:
        """Passes through the model a chunk: the denoise steps and the clean pass."""
        return len(self.sampler.timesteps) + 1

    def held_frames(self, chunks: int) -> int:
        """Frames in the window after so many chunks."""
        frames = chunks * self.chunk
        return frames if self.window == -1 else min(frames, self.window)

    def frame_of_slot(self, chunks: int, slot: int) -> int:
        """The frame in a slot of the window after so many chunks: 0..S-1, then the last ones in order."""
        held = self.held_frames(chunks)
        return slot if slot < self.sink or held == chunks * self.chunk else chunks * self.chunk - held + slot

    def needed_frames(self, chunks: int) -> tuple[int, ...]:
        """Frames that the chunk after so many chunks can still attend to: its roll drops the others of the window.

        Window 7, sink 3, chunk 3 after 4 chunks: (0, 1, 2, 11).
        """
        dropped = 0
        if self.window != -1:
            dropped = max(0, self.held_frames(chunks) + self.chunk - self.window)
        slots = [s for s in range(self.held_frames(chunks)) if not self.sink <= s < self.sink + dropped]
        return tuple(self.frame_of_slot(chunks, s) for s in slots)

    def needed_chunks(self, chunks: int) -> tuple[int, ...]:
        """The chunks whose keys and values restore the state after so many chunks, oldest first."""
        return tuple(sorted({frame // self.chunk for frame in self.needed_frames(chunks)}))


STREAMS: dict[Layout, StreamConfig] = {
    "v1-fast": StreamConfig(chunk=3, window=-1, sink=0, sampler=V1_FAST),
    "v2-14b": StreamConfig(chunk=4, window=18, sink=6, sampler=V2_14B),
    "v2-1.3b": StreamConfig(chunk=4, window=18, sink=6, sampler=V2_1_3B),
}
"""What each release was made for."""


def pixel_frames(chunk_index: int, chunk: int) -> int:
    """Frames that a chunk of `chunk` latents adds to the video.  chunk 3: 9, then 12 each."""
    return FRAMES_PER_LATENT * chunk - (FRAMES_PER_LATENT - 1 if chunk_index == 0 else 0)


def whole_chunks(frames: int, chunk: int) -> int:
    """Chunks of a video of 4n + 1 frames; latents beyond the last whole chunk are not made.  (81, 3): 7."""
    return ((frames - 1) // FRAMES_PER_LATENT + 1) // chunk


def fit_size(area: int, image_height: int, image_width: int) -> tuple[int, int]:
    """Height and width in pixels of a world of about `area` pixels in the image's proportions.

    (480 * 832, 1080, 1920): (464, 832).  The sides in latents are rounded down to even numbers.
    """
    if min(area, image_height, image_width) < 1:
        raise ValueError(f"size: got area {area} and image {image_height}x{image_width}, expected numbers above 0")
    # floor(sqrt(area * ratio) / 8) in integers: in floats 480x832 would come out as 464x832.
    sides = ((image_height, image_width), (image_width, image_height))
    height, width = (2 * (isqrt(area * a // (b * VAE_STRIDE**2)) // 2) for a, b in sides)
    if min(height, width) < PATCH[1]:
        raise ValueError(
            f"size: an image of {image_height}x{image_width} gives {height * VAE_STRIDE}x{width * VAE_STRIDE} pixels "
            f"at area {area}, expected at least {PIXEL_MULTIPLE} each way; use a less extreme image"
        )
    return height * VAE_STRIDE, width * VAE_STRIDE


def latent_size(height: int, width: int) -> tuple[int, int]:
    """Rows and columns of latents for a size in pixels."""
    return height // VAE_STRIDE, width // VAE_STRIDE


def frame_tokens(height: int, width: int) -> int:
    """Tokens of a latent frame for a size in pixels.  (464, 832): 1508."""
    h, w = latent_size(height, width)
    return (h // PATCH[1]) * (w // PATCH[2])
