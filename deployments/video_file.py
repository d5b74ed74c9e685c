"""Frames to files: H.264 mp4, PNG sheet, npz.

Frames are RGB [F, H, W, 3] uint8; F frame (1 or more), H/W multiples of 16.

ffmpeg comes with imageio-ffmpeg, but is run here directly: imageio's writer neither looks at ffmpeg's exit status nor
keeps what it says, so a failed encoding would look like a short file.
"""

from __future__ import annotations

import io
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path

import imageio.v3 as iio
import imageio_ffmpeg
import numpy as np

# Measured on 60 drawn clips of the demo world (hard-edged shapes, 17 x 128 x 128), PSNR in RGB against the frames:
# crf 10 gives 38.8 dB or more (median 43.4) in a decoder that interpolates chroma, as players do, and 34.5 dB or more
# (median 39.1; 2 clips under 35) in one that repeats it, as ffmpeg's default conversion to RGB does.  Lossless H.264
# gains 0.2 dB there (1 clip under 35): what is left is yuv420p's half-size chroma.  crf 18 loses 1 to 2 dB.
# veryfast takes a third of medium's CPU time at 832 x 480 (1.8 s, 5.7 s for 81 frames) and loses 0.1 dB.
_QUALITY = ("-preset", "veryfast", "-crf", "10")
# Two: one file leaves no core idle for long, several replicas on a node do not crowd each other out.
_THREADS = ("-threads", "2", "-filter_threads", "2")
# Without a named matrix swscale converts by bt601, which players of HD sizes take for bt709: shifted hues.
# area: each chroma sample is the mean of its four pixels; bicubic and lanczos lose .1 dB where chroma is repeated.
_TO_YUV = (
    "scale=in_range=pc:out_range=tv:out_color_matrix=bt709:flags=area+accurate_rnd+full_chroma_int+full_chroma_inp,"
    "format=yuv420p,"
    "setparams=range=tv:colorspace=bt709:color_primaries=bt709:color_trc=bt709"
)

ENCODING = " ".join((imageio_ffmpeg.__version__, *_QUALITY, *_THREADS, _TO_YUV))
"""What decides a file's bytes beside frames and fps."""


class InvalidFrames(ValueError):
    """An array that is no video of this application."""

    def __init__(self, shape: tuple[int, ...], dtype: str) -> None:
        super().__init__(shape, dtype)
        self.shape, self.dtype = shape, dtype

    def __str__(self) -> str:
        return (
            f"frames: got {self.dtype} {list(self.shape)}, expected uint8 [F, H, W, 3], F at least 1, "
            "H and W multiples of 16"
        )


class EncodingFailed(RuntimeError):
    """ffmpeg made no file; the message is its own."""


def video_mp4(frames: np.ndarray, fps: int) -> bytes:
    """An mp4 file: H.264, yuv420p, bt709 in limited range and tagged so, index before the data (plays while it loads).

    frames: as in the module docstring.  fps: frames a second, 1 or more.  Raises InvalidFrames, EncodingFailed.
    """
    _check(frames)
    _, height, width, _ = frames.shape
    with tempfile.TemporaryDirectory(prefix="worldstage-") as folder:
        # A file, not a pipe: `+faststart` goes back to the beginning once the index is known.
        path = Path(folder, "video.mp4")
        command = [
            *(imageio_ffmpeg.get_ffmpeg_exe(), "-hide_banner", "-loglevel", "error", "-nostdin"),
            *("-f", "rawvideo", "-pix_fmt", "rgb24", "-video_size", f"{width}x{height}", "-framerate", str(fps)),
            *("-i", "pipe:0", "-vf", _TO_YUV, "-c:v", "libx264", *_QUALITY, *_THREADS),
            *("-movflags", "+faststart", str(path)),
        ]
        with (
            tempfile.TemporaryFile() as words,
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=words) as process,
        ):
            taken = _feed(process, frames)
            status = process.wait()
            if status != 0 or not taken:
                words.seek(0)
                said = words.read().decode(errors="replace").strip() or "nothing"
                raise EncodingFailed(f"ffmpeg ended with status {status} and said: {said}")
        return path.read_bytes()


def sheet(frames: np.ndarray, columns: int = 8) -> bytes:
    """A PNG of at most `columns` frames side by side, evenly chosen from first to last.  Raises InvalidFrames."""
    _check(frames)
    if columns < 1:
        raise ValueError(f"columns: got {columns}, expected 1 or more")
    chosen = np.linspace(0, len(frames) - 1, min(columns, len(frames))).round().astype(int)
    return iio.imwrite("<bytes>", np.concatenate(list(frames[chosen]), axis=1), extension=".png")


def frames_npz(frames: np.ndarray, fps: int) -> bytes:
    """The raw frames as a compressed npz: `frames` as given, `fps` int64 scalar.  Raises InvalidFrames."""
    _check(frames)
    file = io.BytesIO()
    np.savez_compressed(file, frames=frames, fps=np.int64(fps))
    return file.getvalue()


def _feed(process: subprocess.Popen[bytes], frames: np.ndarray) -> bool:
    """Hand over all frames.  False when ffmpeg closed its end first: it has failed and is about to say why."""
    assert process.stdin is not None
    try:
        for frame in frames:
            process.stdin.write(np.ascontiguousarray(frame).data)
        process.stdin.close()
    except BrokenPipeError:
        with suppress(BrokenPipeError):  # what is still buffered has nowhere to go either
            process.stdin.close()
        return False
    return True


def _check(frames: np.ndarray) -> None:
    shape = frames.shape
    fits = len(shape) == 4 and shape[3] == 3 and min(shape) > 0 and shape[1] % 16 == 0 and shape[2] % 16 == 0
    if frames.dtype != np.uint8 or not fits:
        raise InvalidFrames(shape, str(frames.dtype))
