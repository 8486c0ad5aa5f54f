"""Files behind a URL, by fsspec: S3, GCS, HDFS, memory and what else is installed."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import fsspec
import numpy as np
from numpy.typing import NDArray

from persia._files.storage import Buffer, FileReader, Storage, failed
from persia.errors import CheckpointError


class _RemoteReader(FileReader):
    def __init__(self, system: Any, path: str, name: str) -> None:
        self._system = system
        self._path = path
        self._name = name
        self.size = system.info(path)["size"]

    def read_into(self, target: NDArray[np.uint8], offset: int) -> None:
        # A range of no bytes is one that servers refuse.
        if not len(target):
            return
        data = self._system.cat_file(self._path, start=offset, end=offset + len(target))
        if len(data) != len(target):
            raise CheckpointError(
                f"{self._name}: expected {len(target)} bytes at {offset}, got {len(data)}"
            )
        target[:] = np.frombuffer(data, np.uint8)


class RemoteStorage(Storage):
    """A folder that fsspec reaches.

    Args:
        url: Of the folder.
        atomic_put: Whether a file that is written whole appears whole, as objects do.
        options: For fsspec's file system.
    """

    # A request each: a part is one.
    read_bytes = 64 << 20

    def __init__(self, url: str, *, atomic_put: bool, **options: Any) -> None:
        self.url = url
        self._atomic_put = atomic_put
        self._system, self._root = fsspec.core.url_to_fs(url, **options)

    def write(self, path: str, buffers: Iterable[Buffer]) -> None:
        """Write a whole object."""
        whole = io.BytesIO()
        for buffer in buffers:
            whole.write(buffer)
            self.on_progress()
        with self._failing("write", path):
            self._put(self._path(path), whole.getvalue())  # no copy of it

    def sync(self, folder: str) -> None:
        """Nothing: what was written is there."""

    def publish(self, path: str, data: bytes) -> None:
        """Put one object, or write aside and rename."""
        target = self._path(path)
        with self._failing("publish", path):
            if self._atomic_put:
                self._put(target, data)
                return
            self._put(f"{target}.tmp", data)
            self._system.mv(f"{target}.tmp", target)

    @contextmanager
    def open(self, path: str) -> Iterator[FileReader]:
        """Look up a file."""
        with self._failing("read", path):
            self._system.invalidate_cache()
            yield _RemoteReader(self._system, self._path(path), self.at(path))

    def list(self, folder: str = "") -> list[str]:
        """Return the names in a folder."""
        with self._failing("list", folder):
            self._system.invalidate_cache()
            parent = self._path(folder).rstrip("/")
            try:
                found = self._system.ls(parent, detail=False)
            except (FileNotFoundError, NotADirectoryError):
                return []
            names = {name.rstrip("/").rpartition("/")[2] for name in found}
            # Some stores list the folder's own marker, or a file of that name.
            return sorted(names - {"", parent.rpartition("/")[2]})

    def remove(self, path: str) -> None:
        """Remove one object."""
        with self._failing("remove", path), suppress(FileNotFoundError):
            self._system.invalidate_cache()
            self._system.rm_file(self._path(path))

    def remove_folder(self, path: str) -> None:
        """Remove all objects below a path."""
        with self._failing("remove", path), suppress(FileNotFoundError):
            self._system.invalidate_cache()
            self._system.rm(self._path(path), recursive=True)

    def _put(self, path: str, data: bytes) -> None:
        self._system.makedirs(self._system._parent(path), exist_ok=True)
        self._system.pipe_file(path, data)

    def _path(self, path: str) -> str:
        return f"{self._root}/{path}" if path else str(self._root)

    @contextmanager
    def _failing(self, verb: str, path: str) -> Iterator[None]:
        try:
            yield
        except CheckpointError:
            raise
        except Exception as exc:  # each of fsspec's systems has its own
            raise failed(verb, self.at(path), exc) from exc
