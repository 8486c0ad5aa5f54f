"""Which keys each role needs, as docs/security.md says."""

from __future__ import annotations

from pathlib import Path

from persia._rpc.curve import make_keys

_LISTENS = ("server.secret", "server.public", "control.public", "data.public")

FILES = {
    "embedding-parameter-server": (*_LISTENS, "data.secret"),
    "embedding-worker": (*_LISTENS, "control.secret"),
    "nn-worker": (*_LISTENS, "control.secret"),
    "data-loader": ("server.public", "data.secret"),
}


def keys_of_roles(place: Path) -> dict[str, Path]:
    """Make keys, and a directory for each role with what it needs."""
    make_keys(place / "all")
    directories = {role: place / role for role in FILES}
    for role, directory in directories.items():
        directory.mkdir()
        for name in FILES[role]:
            (directory / name).write_bytes((place / "all" / name).read_bytes())
    return directories
