"""The size of a benchmarked video, and what it is in latents."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class VideoShape:
    """Pixels and frames, as in ``832x480x81``."""

    width: int
    height: int
    frames: int

    @classmethod
    def parse(cls, text: str) -> VideoShape:
        """WIDTHxHEIGHTxFRAMES.  Raises ValueError: width and height are multiples of 16, frames 4k + 1."""
        match = re.fullmatch(r"(\d{1,5})x(\d{1,5})x(\d{1,4})", text)
        if match is None:
            raise ValueError(f"shape: got {text!r}, expected WIDTHxHEIGHTxFRAMES such as 832x480x81")
        width, height, frames = map(int, match.groups())
        if not width or not height or width % 16 or height % 16 or frames % 4 != 1:
            raise ValueError(f"shape: got {text!r}, expected width and height in multiples of 16 and 4k + 1 frames")
        return cls(width, height, frames)

    def __str__(self) -> str:
        return f"{self.width}x{self.height}x{self.frames}"

    def latents(self, channels: int) -> tuple[int, int, int, int, int]:
        """(1, C, F, H, W) of Wan's VAE, 4 frames and 8 pixels a latent one.  832x480x81: (1, 16, 21, 60, 104)."""
        return 1, channels, (self.frames - 1) // 4 + 1, self.height // 8, self.width // 8

    @property
    def tokens(self) -> int:
        """Latent tokens of a forward pass, patches of 1 x 2 x 2.  832x480x81: 32760."""
        _, _, frames, height, width = self.latents(1)
        return frames * (height // 2) * (width // 2)
