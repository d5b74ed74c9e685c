from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path

import pytest

from deployments.storage import LEFTOVER_AGE_S, InvalidKey, ObjectNotFound, Storage, StorageUnavailable


@pytest.fixture(params=["folder", "memory"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    """Both ways to write: rename into place, and one put."""
    return Storage(str(tmp_path / "results") if request.param == "folder" else f"memory://{uuid.uuid4().hex}")


def test_what_is_put_comes_back(storage: Storage, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(b"from a file")
    storage.put_bytes(b"0123456789", "video_1/video.mp4")
    storage.put_file(source, "video_1/sheet.png")
    assert storage.read_bytes("video_1/video.mp4") == b"0123456789"
    assert storage.read_bytes("video_1/sheet.png") == b"from a file"
    assert source.exists()
    assert (storage.size("video_1/video.mp4"), storage.size("video_1/sheet.png")) == (10, 11)
    with storage.open_read("video_1/video.mp4") as file:
        file.seek(4)
        assert file.read(3) == b"456"
    storage.put_bytes(b"", "video_1/video.mp4")
    assert storage.read_bytes("video_1/video.mp4") == b""


def test_absent_objects(storage: Storage) -> None:
    storage.put_bytes(b"x", "video_1/video.mp4")
    for key in ("video_1/sheet.png", "video_2/video.mp4"):
        assert not storage.exists(key)
        for read in (storage.open_read, storage.read_bytes, storage.size):
            with pytest.raises(ObjectNotFound, match=f"nothing is stored as '{key}'"):
                read(key)
        storage.delete(key)
    assert storage.exists("video_1/video.mp4")
    assert not storage.exists("video_1")  # a prefix is no object
    assert issubclass(ObjectNotFound, FileNotFoundError)  # what readers that know nothing of this module catch


def test_prefixes_end_at_a_slash(storage: Storage) -> None:
    for key in ("video_1/b", "video_1/a/c", "video_10/x", "video_2"):
        storage.put_bytes(b"x", key)
    assert storage.list("video_1") == ("video_1/a/c", "video_1/b")
    assert storage.list("video_2") == ()
    assert storage.list("video_3") == ()
    storage.delete("video_1/b")
    assert storage.list("video_1") == ("video_1/a/c",)
    storage.delete_prefix("video_1")
    storage.delete_prefix("video_1")  # a removal that was cut short is repeated
    assert storage.list("video_1") == ()
    assert storage.list("video_10") == ("video_10/x",)
    assert storage.exists("video_2")


@pytest.mark.parametrize(
    "key",
    ["", "/etc/passwd", "..", "a/../b", "a//b", "a/", "./a", ".incoming/x", "a/.b", "a b", "a\n", "-a", "a\\b", "é"],
)
def test_keys_cannot_leave_the_root(storage: Storage, key: str) -> None:
    calls = (
        lambda: storage.put_bytes(b"x", key),
        lambda: storage.put_file(__file__, key),
        lambda: storage.open_read(key),
        lambda: storage.read_bytes(key),
        lambda: storage.size(key),
        lambda: storage.exists(key),
        lambda: storage.list(key),
        lambda: storage.delete(key),
        lambda: storage.delete_prefix(key),
    )
    for call in calls:
        with pytest.raises(InvalidKey, match=r"such as video_1/video\.mp4"):
            call()


def test_a_url_that_cannot_work_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StorageUnavailable, match=r"storage_url: got 'nonsense://x'.*Protocol not known"):
        Storage("nonsense://x")
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageUnavailable, match="cannot be written"):
        Storage(str(tmp_path / "file"))


def test_a_write_that_fails_leaves_the_old_object_and_no_litter(tmp_path: Path) -> None:
    storage = Storage(str(tmp_path))
    storage.put_bytes(b"old", "video_1/video.mp4")
    with pytest.raises(StorageUnavailable, match=r"video_1/video\.mp4 cannot be written"):
        storage.put_file(tmp_path / "no such file", "video_1/video.mp4")
    with pytest.raises(StorageUnavailable, match="cannot be written"):
        storage.put_bytes(b"new", "video_1/video.mp4/inside")  # an object is no folder
    assert storage.read_bytes("video_1/video.mp4") == b"old"
    assert list((tmp_path / ".incoming").iterdir()) == []


def test_another_process_sees_the_same_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    storage = Storage("results")
    storage.put_bytes(b"x", "video_1/video.mp4")
    code = "import pickle, sys; print(pickle.load(sys.stdin.buffer).list('video_1'))"
    elsewhere = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    other = subprocess.run(
        [sys.executable, "-c", code],
        input=pickle.dumps(storage),
        cwd="/",
        env=elsewhere,
        capture_output=True,
        check=True,
    )
    assert other.stdout.decode().strip() == "('video_1/video.mp4',)"


def test_old_leftovers_go_at_start_and_young_ones_stay(tmp_path: Path) -> None:
    Storage(str(tmp_path)).put_bytes(b"x", "video_1/video.mp4")
    old, young = tmp_path / ".incoming/old", tmp_path / ".incoming/young"
    for path, age in ((old, LEFTOVER_AGE_S + 60), (young, LEFTOVER_AGE_S - 60), (tmp_path / "video_1/video.mp4", 1e6)):
        path.write_bytes(b"x")
        os.utime(path, (time.time() - age,) * 2)
    storage = Storage(str(tmp_path))
    assert not old.exists()
    assert young.exists()
    assert storage.exists("video_1/video.mp4")


WRITER = """
import sys
from deployments.storage import Storage
storage = Storage(sys.argv[1])
print("ready", flush=True)
number = 0
while True:
    storage.put_bytes(bytes([number % 256]) * 4_000_000, "video_1/video.mp4")
    number += 1
"""


def whole(data: bytes) -> bool:
    return len(data) == 4_000_000 and data == data[:1] * len(data)


def start_writer(folder: Path) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(folder)], env=environment, stdout=subprocess.PIPE)
    assert writer.stdout is not None
    assert writer.stdout.readline() == b"ready\n"
    return writer


def test_readers_never_see_part_of_a_write_nor_does_a_kill_leave_one(tmp_path: Path) -> None:
    storage = Storage(str(tmp_path))
    storage.put_bytes(b"\0" * 4_000_000, "video_1/video.mp4")
    caught = 0
    for tenth_ms in range(0, 80, 10):  # a write takes some milliseconds: the kills fall on different parts of it
        writer = start_writer(tmp_path)
        try:
            seen = [storage.read_bytes("video_1/video.mp4") for _ in range(5)]
            time.sleep(tenth_ms / 1e4)
        finally:
            writer.send_signal(signal.SIGKILL)
            writer.wait()
            writer.stdout.close()
        assert all(map(whole, seen))
        assert whole(storage.read_bytes("video_1/video.mp4"))
        assert storage.list("video_1") == ("video_1/video.mp4",)
        caught += len(list((tmp_path / ".incoming").iterdir()))
    assert caught, "no kill fell into a write: the test shows nothing"


def test_writers_in_threads_do_not_mix(storage: Storage) -> None:
    def write(number: int) -> None:
        for _ in range(10):
            storage.put_bytes(bytes([number]) * 100_000, "video_1/video.mp4")

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    data = storage.read_bytes("video_1/video.mp4")
    assert data == data[:1] * 100_000
