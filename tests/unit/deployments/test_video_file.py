"""Files are judged by what ffmpeg's decoder gives back, never by the encoder's own word."""

from __future__ import annotations

import io
import subprocess
from pathlib import Path

import imageio.v3 as iio
import imageio_ffmpeg
import numpy as np
import pytest

from deployments.video_file import EncodingFailed, InvalidFrames, frames_npz, sheet, video_mp4

FPS = 16


def ffmpeg(*arguments: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([imageio_ffmpeg.get_ffmpeg_exe(), "-hide_banner", *arguments], capture_output=True)


def decode(mp4: bytes, shape: tuple[int, ...], folder: Path, *options: str) -> np.ndarray:
    """RGB frames as ffmpeg converts them by default: matrix and range from the tags, each chroma sample repeated."""
    (folder / "decode.mp4").write_bytes(mp4)
    raw = ffmpeg("-v", "error", "-i", str(folder / "decode.mp4"), *options, "-f", "rawvideo", "-pix_fmt", "rgb24", "-")
    assert raw.returncode == 0, raw.stderr.decode()
    return np.frombuffer(raw.stdout, np.uint8).reshape(shape)


def psnr(a: np.ndarray, b: np.ndarray) -> float:
    return 10 * np.log10(255**2 / np.square(a.astype(float) - b).mean())


def disc(background: tuple[int, ...], colour: tuple[int, ...], frames: int = 17, size: int = 128) -> np.ndarray:
    """A disc of an eighth of the side in radius crosses the frame; edges as wide as one pixel."""
    y, x = np.mgrid[:size, :size] + 0.5
    centres = np.linspace(0.2, 0.8, frames) * size
    inside = np.stack([np.clip(0.5 + size / 8 - np.hypot(x - c, y - size / 2), 0, 1) for c in centres])[..., None]
    return (np.array(background) * (1 - inside) + np.array(colour) * inside).round().astype(np.uint8)


@pytest.mark.parametrize(
    ("background", "colour"),
    [((10, 10, 10), (219, 26, 31)), ((115, 115, 115), (36, 61, 235)), ((10, 87, 87), (245, 133, 15))],
    ids=["red on black", "blue on gray", "orange on teal"],  # the demo world's colours; the last pair is its hardest
)
def test_a_small_saturated_moving_shape_survives(
    background: tuple[int, ...], colour: tuple[int, ...], tmp_path: Path
) -> None:
    frames = disc(background, colour)
    # 35 dB is what users are promised; 36.2 was the least measured here, nearly all of it the cost of half-size chroma.
    assert psnr(frames, decode(video_mp4(frames, FPS), frames.shape, tmp_path)) >= 35


def test_a_drifting_photograph_survives(tmp_path: Path) -> None:
    # Amplitudes fall with frequency and the channels share most of their detail, as in photographs.
    spectrum = 1 / np.maximum(np.hypot(np.fft.fftfreq(96)[:, None], np.fft.fftfreq(256)), 1e-2) ** 1.6
    noise = np.fft.fft2(np.random.default_rng(0).standard_normal((4, 96, 256))) * spectrum
    grey, *colours = np.fft.ifft2(noise).real
    texture = grey[..., None] + 0.25 * np.stack(colours, axis=2)
    texture = (texture - texture.min()) / np.ptp(texture) * 255
    frames = np.stack([texture[:, 3 * f : 3 * f + 128] for f in range(9)]).round().astype(np.uint8)
    assert psnr(frames, decode(video_mp4(frames, FPS), frames.shape, tmp_path)) >= 35


# bt709, limited range, 8 bits: Y = 16 + 219 (.2126 R + .7152 G + .0722 B), C = 128 + 224 (B - Y) / 1.8556 and
# 128 + 224 (R - Y) / 1.5748 for R, G, B in 0..1.  bt601 would give 81, 145 and 41 for the luma of red, green and blue.
PURE = {
    (255, 0, 0): (63, 102, 240),
    (0, 255, 0): (173, 42, 26),
    (0, 0, 255): (32, 240, 118),
    (255, 255, 255): (235, 128, 128),
    (0, 0, 0): (16, 128, 128),
}


@pytest.mark.parametrize("rgb", PURE)
def test_pure_colours_are_converted_by_bt709(rgb: tuple[int, int, int], tmp_path: Path) -> None:
    frames = np.broadcast_to(np.array(rgb, np.uint8), (2, 16, 16, 3))
    mp4 = video_mp4(frames, FPS)
    (tmp_path / "pure.mp4").write_bytes(mp4)
    raw = ffmpeg("-v", "error", "-i", str(tmp_path / "pure.mp4"), "-f", "rawvideo", "-").stdout
    planes = np.frombuffer(raw, np.uint8).reshape(2, 16 * 16 * 3 // 2)[0].astype(int)
    found = planes[:256].mean(), planes[256:320].mean(), planes[320:].mean()
    assert found == pytest.approx(PURE[rgb], abs=1)  # one code value: rounding in swscale and quantisation at crf 10
    # Back in RGB by the file's own tags: a luma code is 1.16 RGB codes, a chroma code up to 2.1 of them.
    assert np.abs(decode(mp4, frames.shape, tmp_path).astype(int) - frames).max() <= 4


def test_the_file_says_what_it_is(tmp_path: Path) -> None:
    frames = disc((10, 10, 10), (219, 26, 31))
    (tmp_path / "tags.mp4").write_bytes(video_mp4(frames, 24))
    words = ffmpeg("-i", str(tmp_path / "tags.mp4")).stderr.decode()
    # ffmpeg prints the three colour tags as one word when all say the same, as matrix/primaries/transfer else.
    assert "Video: h264" in words
    assert "yuv420p(tv, bt709, progressive)" in words
    assert "128x128" in words
    assert "24 fps" in words
    assert f"Duration: 00:00:00.{round(17 / 24 * 100)}" in words


def boxes(mp4: bytes) -> list[str]:
    """Names of the top-level boxes: each is a 32 bit big-endian length, a name, and content (ISO 14496-12)."""
    names, at = [], 0
    while at < len(mp4):
        names.append(mp4[at + 4 : at + 8].decode())
        at += int.from_bytes(mp4[at : at + 4])
    assert at == len(mp4)
    return names


def test_the_index_comes_before_the_data() -> None:
    names = boxes(video_mp4(disc((10, 10, 10), (219, 26, 31), frames=5), FPS))
    assert names[0] == "ftyp"
    assert names.index("moov") < names.index("mdat")


def test_one_frame_and_a_view_that_is_not_contiguous(tmp_path: Path) -> None:
    frames = disc((115, 115, 115), (36, 61, 235), frames=5)
    view = np.ascontiguousarray(frames.transpose(3, 0, 1, 2)).transpose(1, 2, 3, 0)  # as a decoder leaves them
    assert not view.flags.c_contiguous
    assert video_mp4(view, FPS) == video_mp4(frames, FPS)
    assert psnr(frames[:1], decode(video_mp4(frames[:1], FPS), (1, 128, 128, 3), tmp_path)) >= 35


@pytest.mark.parametrize(
    "frames",
    [
        np.zeros((2, 16, 16, 3), np.float32),
        np.zeros((0, 16, 16, 3), np.uint8),
        np.zeros((2, 3, 16, 16), np.uint8),
        np.zeros((2, 16, 24, 3), np.uint8),
        np.zeros((16, 16, 3), np.uint8),
    ],
    ids=["float", "no frame", "channels first", "width 24", "an image"],
)
def test_other_arrays_are_refused(frames: np.ndarray) -> None:
    for make in (lambda: video_mp4(frames, FPS), lambda: sheet(frames), lambda: frames_npz(frames, FPS)):
        with pytest.raises(InvalidFrames, match=r"expected uint8 \[F, H, W, 3\]"):
            make()


def test_ffmpegs_own_words_reach_the_caller() -> None:
    with pytest.raises(EncodingFailed, match=r'status \d+ and said: .*Unable to parse "framerate"'):
        video_mp4(np.zeros((2, 16, 16, 3), np.uint8), fps=0)


def test_an_encoder_that_dies_under_way_is_a_failure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # It takes one byte of 12 MB and goes; imageio-ffmpeg finds ffmpeg through this variable.
    fake = tmp_path / "ffmpeg"
    fake.write_text("#!/bin/sh\nhead -c 1 >/dev/null\necho 'No space left on device' >&2\nexit 3\n")
    fake.chmod(0o755)
    monkeypatch.setenv("IMAGEIO_FFMPEG_EXE", str(fake))
    with pytest.raises(EncodingFailed, match="status 3 and said: No space left on device"):
        video_mp4(np.zeros((4, 1024, 1024, 3), np.uint8), FPS)


def test_a_sheet_shows_frames_from_first_to_last() -> None:
    frames = np.zeros((17, 16, 32, 3), np.uint8) + np.arange(17, dtype=np.uint8)[:, None, None, None]
    image = iio.imread(sheet(frames, columns=5), extension=".png")
    assert image.shape == (16, 5 * 32, 3)
    assert image[0, ::32, 0].tolist() == [0, 4, 8, 12, 16]
    assert iio.imread(sheet(frames[:3], columns=5), extension=".png")[0, ::32, 0].tolist() == [0, 1, 2]
    assert iio.imread(sheet(frames, columns=1), extension=".png")[0, ::32, 0].tolist() == [0]
    with pytest.raises(ValueError, match="columns: got 0"):
        sheet(frames, columns=0)


def test_raw_frames_come_back_exactly() -> None:
    frames = np.random.default_rng(0).integers(0, 256, (5, 16, 16, 3), np.uint8)
    with np.load(io.BytesIO(frames_npz(frames, 24))) as stored:
        assert stored["frames"].dtype == np.uint8
        assert np.array_equal(stored["frames"], frames)
        assert stored["fps"] == 24
