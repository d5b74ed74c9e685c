"""Result files and saved solver states, on a folder or any fsspec file system that every node can reach.

Invariant: an object is absent or whole, for every reader, also after a kill or a power cut in the middle of a write.
In a folder an object is written under `.incoming` first, synced, and renamed into place; elsewhere it is one put, which
object stores (s3, gs, az) make visible only once complete.

Keys look like `<job id>/<file>`: segments of letters, digits, `_`, `.` and `-`, none of which starts with a dot.
"""

from __future__ import annotations

import os
import re
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

import fsspec
from fsspec.implementations.local import LocalFileSystem

LEFTOVER_AGE_S = 3600.0
"""A file under `.incoming` untouched for so long belongs to a writer that died: one write takes seconds."""

_INCOMING = ".incoming"
_SEGMENT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}")


class InvalidKey(ValueError):
    """A key that names no place inside the storage."""

    def __init__(self, key: str) -> None:
        super().__init__(key)
        self.key = key

    def __str__(self) -> str:
        return (
            f"key: got {self.key!r}, expected segments of letters, digits, '_', '.' and '-' joined by '/', "
            "none starting with '.' or '-', such as video_1/video.mp4"
        )


class ObjectNotFound(FileNotFoundError):
    """Nothing is stored under this key."""

    def __init__(self, key: str) -> None:
        super().__init__(key)
        self.key = key

    def __str__(self) -> str:
        return f"key: nothing is stored as {self.key!r}"


class StorageUnavailable(OSError):
    """The place behind the storage URL cannot be reached, read or written."""


class Storage:
    """Objects under one root.  Constructed or unpickled in any process; safe to use from any thread.

    url: a folder, made if absent (a relative one counts from the working directory of the process that constructs), or
    an fsspec URL.  Constructing removes what dead writers left in the folder.  Raises StorageUnavailable.
    """

    def __init__(self, url: str) -> None:
        try:
            # Cached listings would hide what other processes wrote.
            self._fs, root = fsspec.core.url_to_fs(url, use_listings_cache=False)
        except (ValueError, ImportError) as error:
            raise StorageUnavailable(
                f"storage_url: got {url!r}: {error}; expected a folder or a URL of an installed fsspec file system"
            ) from error
        self._root = str(root).rstrip("/")
        self._folder = Path(self._root) if isinstance(self._fs, LocalFileSystem) else None
        if self._folder is not None:
            try:
                (self._folder / _INCOMING).mkdir(parents=True, exist_ok=True)
                _remove_leftovers(self._folder / _INCOMING)
            except OSError as error:
                raise StorageUnavailable(f"storage_url: got {url!r}, which cannot be written: {error}") from error

    def put_bytes(self, data: bytes, key: str) -> None:
        """Store data under key, replacing what was there.  Raises InvalidKey, StorageUnavailable."""
        path = self._path(key)
        with _writing(key):
            if self._folder is None:
                self._fs.pipe_file(path, data)
            else:
                self._put_in_folder(lambda incoming: incoming.write_bytes(data), Path(path), self._folder)

    def put_file(self, local_path: str | os.PathLike[str], key: str) -> None:
        """Store a copy of a local file under key, replacing what was there.  Raises as `put_bytes`."""
        path = self._path(key)
        with _writing(key):
            if self._folder is None:
                self._fs.put_file(os.fspath(local_path), path)
            else:
                self._put_in_folder(lambda incoming: shutil.copyfile(local_path, incoming), Path(path), self._folder)

    def open_read(self, key: str) -> BinaryIO:
        """A seekable binary file; the caller closes it.  Raises ObjectNotFound, InvalidKey, StorageUnavailable."""
        with _reading(key):
            file: BinaryIO = self._fs.open(self._path(key), "rb")
            return file

    def read_bytes(self, key: str) -> bytes:
        """The whole object.  Raises as `open_read`."""
        with _reading(key):
            data: bytes = self._fs.cat_file(self._path(key))
            return data

    def size(self, key: str) -> int:
        """Bytes.  Raises as `open_read`."""
        with _reading(key):
            return int(self._fs.size(self._path(key)))

    def exists(self, key: str) -> bool:
        """Whether an object is stored under key.  Raises InvalidKey, StorageUnavailable."""
        with _reading(key):
            return bool(self._fs.isfile(self._path(key)))

    def list(self, prefix: str) -> tuple[str, ...]:
        """Keys below `prefix/`, sorted; none if there is nothing.  Raises InvalidKey, StorageUnavailable."""
        with _reading(prefix):
            found = self._fs.find(self._path(prefix))
        keys = (path.removeprefix(f"{self._root}/") for path in found)
        return tuple(sorted(key for key in keys if key != prefix))  # find answers an object with itself

    def delete(self, key: str) -> None:
        """Remove an object; absent is what is wanted, and no error.  Raises InvalidKey, StorageUnavailable."""
        with _writing(key), suppress(FileNotFoundError):
            self._fs.rm_file(self._path(key))

    def delete_prefix(self, prefix: str) -> None:
        """Remove everything below `prefix/`; a removal cut short can be repeated.  Raises as `delete`."""
        with _writing(prefix), suppress(FileNotFoundError):
            self._fs.rm(self._path(prefix), recursive=True)

    def _path(self, key: str) -> str:
        if not all(_SEGMENT.fullmatch(segment) for segment in key.split("/")):
            raise InvalidKey(key)
        return f"{self._root}/{key}"

    def _put_in_folder(self, write: Callable[[Path], object], path: Path, root: Path) -> None:
        incoming = root / _INCOMING / uuid.uuid4().hex
        try:
            write(incoming)
            # Without it a power cut can leave the new name on an empty file: the rename may reach the disk first.
            _sync(incoming)
            path.parent.mkdir(parents=True, exist_ok=True)
            incoming.replace(path)
        finally:
            incoming.unlink(missing_ok=True)
        # The name itself must survive too, once the caller writes `completed` into the job table.
        for folder in (path.parent, *path.parent.parents):
            _sync(folder)
            if folder == root:
                break


@contextmanager
def _reading(key: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise ObjectNotFound(key) from error
    except OSError as error:
        raise StorageUnavailable(f"key: {key} cannot be read: {error}") from error


@contextmanager
def _writing(key: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageUnavailable(f"key: {key} cannot be written: {error}") from error


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove_leftovers(incoming: Path) -> None:
    oldest = time.time() - LEFTOVER_AGE_S
    for file in incoming.iterdir():
        try:
            if file.stat().st_mtime < oldest:
                file.unlink()
        except FileNotFoundError:
            continue  # its writer, or another process that starts, was quicker
