"""Where a path or URL leads: its storage, and whether a server may go there.

A client names the URL of a checkpoint, and the server opens it with its own rights. So a server
that others can reach opens only what is below the roots that its operator has named.
"""

from __future__ import annotations

import io
import os
import posixpath
import urllib.parse
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from persia._files.storage import Buffer, FileReader, LocalStorage, Storage
from persia.errors import CheckpointError, ConfigError

# Whole objects or nothing: a PUT is atomic, while a rename would copy.
_OBJECT_STORES = frozenset(
    ("memory", "s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "oci", "oss")
)


def open_storage(url: str | os.PathLike[str], **options: Any) -> Storage:
    """Return the storage of a path, or of a URL such as ``s3://bucket/folder``.

    ``options`` are of fsspec's file system: credentials, an endpoint.
    """
    text = os.fspath(url)
    scheme, path = _split(text)
    if not scheme:
        return LocalStorage(path)
    try:
        return RemoteStorage(text, atomic_put=scheme in _OBJECT_STORES, **options)
    except (ImportError, ValueError) as exc:
        raise ConfigError(f"{text}: cannot be opened: {exc}") from exc


def folder_url(given: object, name: str) -> str:
    """Return what a user gave as argument ``name``, a folder's path or URL, as a text."""
    text = os.fspath(given) if isinstance(given, str | os.PathLike) else None
    if not isinstance(text, str) or not text:
        raise ConfigError(f"{name}: expected a folder's path or URL, got {given!r}")
    return text


def _split(url: str) -> tuple[str, str]:
    """Return scheme and path; the scheme of this machine's files is empty."""
    scheme, separator, rest = url.partition("://")
    if not separator:
        return "", url
    if scheme == "file":
        return "", urllib.parse.unquote(rest)
    return ("", rest) if scheme == "local" else (scheme, rest)


class AllowedRoots:
    """Folders and URLs, with all that is below them; None is every folder, [] none.

    ``setting`` is where they come from, for errors.
    """

    def __init__(
        self,
        roots: Sequence[str] | None = None,
        setting: str = "PERSIA_CHECKPOINT_ROOTS of the server",
    ) -> None:
        self._setting = setting
        self._roots = None if roots is None else [(root, _place(root)) for root in roots]

    def check(self, url: str, name: str = "") -> None:
        """Refuse a folder, or one named in it, that is below none of the roots.

        Links and ``..`` are followed. The URL is checked without the name too: an empty one, or
        a bare ``s3://``, leads elsewhere with a name behind it.
        """
        if self._roots is None:
            return
        if name:
            self.check(url)
            url = f"{url.rstrip('/')}/{name}"
        scheme, path = _place(url)
        # How fsspec or a server reads dots, a second scheme or escapes is not known here.
        is_plain = not scheme or ("::" not in path and posixpath.normpath(path) == path)
        for _, (its_scheme, root) in self._roots:
            is_below = path == root or path.startswith(root.rstrip("/") + "/")
            has_escapes = bool(scheme and set(path.removeprefix(root)) & set("%?#\\"))
            if scheme == its_scheme and is_plain and is_below and not has_escapes:
                return
        names = ", ".join(name for name, _ in self._roots) or "none"
        raise CheckpointError(
            f"{url!a:.200}: expected a folder below one of {self._setting} ({names}), "
            f"this one leads to {scheme and scheme + '://'}{path:.200}"
        )


def _place(url: str) -> tuple[str, str]:
    """Return the scheme and where the path leads, links and ``..`` followed."""
    scheme, path = _split(url)
    if scheme:
        return scheme, path.rstrip("/")
    try:
        return "", os.path.realpath(path)
    except ValueError as exc:
        raise CheckpointError(f"{url!a:.200}: {exc}") from exc


ANYWHERE = AllowedRoots()


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
    """A folder that fsspec reaches; with ``atomic_put`` what is put appears whole."""

    # A request each: a part is one.
    read_bytes = 64 << 20
    _errors = Exception  # each of fsspec's systems has its own

    def __init__(self, url: str, *, atomic_put: bool, **options: Any) -> None:
        import fsspec  # which is optional

        self.url = url
        self._atomic_put = atomic_put
        self._system, self._root = fsspec.core.url_to_fs(url, **options)

    def write(self, path: str, buffers: Iterable[Buffer]) -> None:
        whole = io.BytesIO()
        for buffer in buffers:
            whole.write(buffer)
            self.on_progress()
        with self.failing("write", path):
            self._put(self._path(path), whole.getvalue())  # no copy of it

    def sync(self, folder: str) -> None:
        """Nothing: what was written is there."""

    def publish(self, path: str, data: bytes) -> None:
        """Put one object, or write aside and rename."""
        target = self._path(path)
        with self.failing("publish", path):
            if self._atomic_put:
                self._put(target, data)
                return
            self._put(f"{target}.tmp", data)
            self._system.mv(f"{target}.tmp", target)

    @contextmanager
    def open(self, path: str) -> Iterator[FileReader]:
        with self.failing("read", path):
            self._system.invalidate_cache()
            yield _RemoteReader(self._system, self._path(path), self.at(path))

    def list(self, folder: str = "") -> list[str]:
        with self.failing("list", folder):
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
        with self.failing("remove", path), suppress(FileNotFoundError):
            self._system.invalidate_cache()
            self._system.rm_file(self._path(path))

    def remove_folder(self, path: str) -> None:
        with self.failing("remove", path), suppress(FileNotFoundError):
            self._system.invalidate_cache()
            self._system.rm(self._path(path), recursive=True)

    def _put(self, path: str, data: bytes) -> None:
        self._system.makedirs(self._system._parent(path), exist_ok=True)
        self._system.pipe_file(path, data)

    def _path(self, path: str) -> str:
        return f"{self._root}/{path}" if path else str(self._root)
