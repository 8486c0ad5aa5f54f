"""Where a path or URL leads: its storage, and whether a server may go there.

A client names the URL of a checkpoint, and the server opens it with its own rights. So a server
that others can reach opens only what is below the roots that its operator has named.
"""

from __future__ import annotations

import os
import posixpath
import urllib.parse
from collections.abc import Sequence
from typing import Any

from persia._files.storage import LocalStorage, Storage
from persia.errors import CheckpointError, ConfigError

# Whole objects or nothing: a PUT is atomic, while a rename would copy.
_OBJECT_STORES = frozenset(
    ("memory", "s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "oci", "oss")
)


def open_storage(url: str | os.PathLike[str], **options: Any) -> Storage:
    """Return the storage of a folder.

    Args:
        url: A path, or a URL such as ``s3://bucket/folder``; ``file://`` is a path too.
        options: For fsspec's file system: credentials, an endpoint.

    Raises:
        ConfigError: fsspec, or what it needs for this URL, is not installed.
    """
    text = os.fspath(url)
    scheme, path = _split(text)
    if not scheme:
        return LocalStorage(path)
    from persia._files.object_store import RemoteStorage  # fsspec is optional

    try:
        return RemoteStorage(text, atomic_put=scheme in _OBJECT_STORES, **options)
    except (ImportError, ValueError) as exc:
        raise ConfigError(f"{text}: cannot be opened: {exc}") from exc


def folder_url(given: object, name: str) -> str:
    """Return a folder's path or URL as a text.

    Args:
        given: What a user has given.
        name: Of the argument.

    Raises:
        ConfigError: If it is neither.
    """
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
    """Folders and URLs, with all that is below them.

    Args:
        roots: None allows every folder, an empty list none.
    """

    def __init__(self, roots: Sequence[str] | None = None) -> None:
        self._roots = None if roots is None else [(root, *_place(root)) for root in roots]

    def check(self, url: str, name: str = "") -> None:
        """Refuse a folder that is below none of the roots, links and ``..`` followed.

        The URL is checked without the name too: an empty one, or a bare ``s3://``, leads
        elsewhere with a name behind it.

        Args:
            url: What is opened.
            name: Of a folder in it.

        Raises:
            CheckpointError: Names the folder and the roots.
        """
        if self._roots is None:
            return
        if name:
            self.check(url)
            url = f"{url.rstrip('/')}/{name}"
        scheme, path = _place(url)
        for _, its_scheme, root in self._roots:
            # How fsspec reads a path with dots or a second scheme is not known here.
            if scheme == its_scheme and _is_plain(scheme, path) and _is_below(path, root):
                return
        names = ", ".join(root for root, *_ in self._roots) or "none"
        raise CheckpointError(
            f"{url}: expected a folder below one of PERSIA_CHECKPOINT_ROOTS of the server "
            f"({names}), this one leads to {scheme and scheme + '://'}{path}"
        )


def _place(url: str) -> tuple[str, str]:
    """Return the scheme and where the path leads, links and ``..`` followed."""
    scheme, path = _split(url)
    if scheme:
        return scheme, path.rstrip("/")
    try:
        return "", os.path.realpath(path)
    except ValueError as exc:
        raise CheckpointError(f"PERSIA_CHECKPOINT_ROOTS: {url}: {exc}") from exc


def _is_plain(scheme: str, path: str) -> bool:
    return not scheme or ("::" not in path and posixpath.normpath(path) == path)


def _is_below(path: str, root: str) -> bool:
    return path == root or path.startswith(root.rstrip("/") + "/")


ANYWHERE = AllowedRoots()
