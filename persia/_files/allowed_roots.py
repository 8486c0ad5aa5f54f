"""Below which folders a server reads and writes checkpoints.

A client names the URL of a checkpoint, and the server opens it with its own rights. So a server
that others can reach takes only what is below a folder that its operator has named.
"""

from __future__ import annotations

import os
import posixpath
import urllib.parse
from collections.abc import Sequence

from persia.errors import CheckpointError

_LOCAL = ("", "file", "local")  # as open_storage takes them


class AllowedRoots:
    """Folders and URLs, with all that is below them.

    Args:
        roots: None allows every place, an empty list none.
    """

    def __init__(self, roots: Sequence[str] | None = None) -> None:
        self._roots = None if roots is None else [(root, *_place(root)) for root in roots]

    def check(self, url: str, name: str = "") -> None:
        """Refuse a folder that is below none of the roots.

        Links and ``..`` are followed to where they lead. The URL is looked at by itself too:
        with a name behind it, an empty one or a bare ``s3://`` would seem to lead elsewhere.

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
            # What fsspec makes of a name with dots or two schemes is its own affair.
            if scheme == its_scheme and _is_plain(scheme, path) and _is_below(path, root):
                return
        names = ", ".join(root for root, *_ in self._roots) or "none"
        raise CheckpointError(
            f"{url}: expected a folder below one of PERSIA_CHECKPOINT_ROOTS of the server "
            f"({names}), this one leads to {scheme and scheme + '://'}{path}"
        )


def _place(url: str) -> tuple[str, str]:
    """Return the scheme and where it leads; of this machine's files the scheme is empty."""
    scheme, separator, rest = url.partition("://")
    if not separator:
        scheme, rest = "", url
    if scheme not in _LOCAL:
        return scheme, rest.rstrip("/")
    path = urllib.parse.unquote(rest) if scheme == "file" else rest
    try:
        return "", os.path.realpath(path)
    except ValueError as exc:
        raise CheckpointError(f"PERSIA_CHECKPOINT_ROOTS: {url}: {exc}") from exc


def _is_plain(scheme: str, path: str) -> bool:
    return not scheme or ("::" not in path and posixpath.normpath(path) == path)


def _is_below(path: str, root: str) -> bool:
    return path == root or path.startswith(root.rstrip("/") + "/")


ANYWHERE = AllowedRoots()
