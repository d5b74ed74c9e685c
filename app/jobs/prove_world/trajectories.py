"""What the four runs of the proof do: one trajectory, and another that leaves it after some chunks."""

from __future__ import annotations

from deployments.lingbot.controls import ChunkControls, Keys, key_frames
from deployments.lingbot.stream_config import pixel_frames, whole_chunks

MAIN = ("w", "wl", "w", "d", "wi", "l", "wk", "a")
"""Keys held during a chunk, over and over."""
FORK = ("s", "j", "sa", "wd")
"""After the prefix: other translations as well as other turns."""


def trajectory(frame_num: int, prefix_chunks: int, chunk: int, *, forked: bool) -> tuple[ChunkControls, ...]:
    """One entry a chunk.

    frame_num: video frames, 4n + 1; latents beyond the last whole chunk are not made.
    Raises ValueError where the fork would lie beyond the frames that are made.
    """
    chunks = whole_chunks(frame_num, chunk)
    if frame_num < 1 or (frame_num - 1) % 4:
        raise ValueError(f"frame_num: got {frame_num}, expected 4n + 1, such as {frame_num // 4 * 4 + 1}")
    if prefix_chunks < 1:
        raise ValueError(f"prefix_chunks: got {prefix_chunks}, expected 1 or more")
    if chunks <= prefix_chunks:
        least = sum(pixel_frames(index, chunk) for index in range(prefix_chunks + 1))
        raise ValueError(
            f"frame_num: got {frame_num}, which gives {chunks} chunks of {chunk} latents; with prefix_chunks "
            f"{prefix_chunks} the fork needs at least {least}"
        )
    held = [
        FORK[(index - prefix_chunks) % len(FORK)] if forked and index >= prefix_chunks else MAIN[index % len(MAIN)]
        for index in range(chunks)
    ]
    return tuple(ChunkControls(Keys((frozenset(keys),) * key_frames(index, chunk))) for index, keys in enumerate(held))
