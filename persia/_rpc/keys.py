"""Keys, one to a file, and who may do what with them.

    server.secret   of every process that listens: whoever has it can pose as any server
    server.public   of every process that connects: it talks to no other server
    control.secret  of those who may tell servers what to do: the trainer, embedding-workers
    data.secret     of those who may send and look up batches only: the data-loaders
    *.public        beside server.secret: who may connect. Each is a user of its file's name

A process finds what it needs in one directory, and the directories of two roles may differ. It
connects with ``control.secret`` if that is there, else with the one other secret.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import zmq
from zmq.utils import z85

from persia.errors import ConfigError

SERVER, CONTROL, DATA = "server", "control", "data"

_PUBLIC, _SECRET = ".public", ".secret"
_BYTES = 32


class Keys:
    """The keys in a directory, each read when it is needed.

    Args:
        directory: Where they are.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def of_server(self) -> bytes:
        """Return the secret key to listen with.

        Raises:
            ConfigError: If it is not there, or is none.
        """
        return _read(self._directory / f"{SERVER}{_SECRET}")

    def to_server(self) -> bytes:
        """Return the public key that a server must prove to have.

        Raises:
            ConfigError: As ``of_server``.
        """
        return _read(self._directory / f"{SERVER}{_PUBLIC}")

    def own(self) -> bytes:
        """Return the secret key to connect with.

        Raises:
            ConfigError: As ``of_server``, or if several could be meant.
        """
        paths = {path.stem: path for path in self._paths(_SECRET)}
        paths.pop(SERVER, None)
        if CONTROL in paths:
            return _read(paths[CONTROL])
        if len(paths) != 1:
            found = ", ".join(sorted(paths)) or "none"
            raise ConfigError(
                f"PERSIA_KEYS: expected {CONTROL}{_SECRET} or one other secret key to connect "
                f"with in {self._directory}, found {found}"
            )
        return _read(*paths.values())

    def users(self) -> dict[bytes, str]:
        """Return who may connect, by public key.

        Raises:
            ConfigError: As ``of_server``, or if nobody may, or two have the same key.
        """
        users: dict[bytes, str] = {}
        for path in self._paths(_PUBLIC):
            if path.stem == SERVER:
                continue
            key = _read(path)
            if key in users:
                raise ConfigError(f"{path}: expected a key of its own, it is {users[key]}'s")
            users[key] = path.stem
        if not users:
            raise ConfigError(
                f"PERSIA_KEYS: expected a public key of those who may connect in "
                f"{self._directory}, found none but the server's"
            )
        return users

    def _paths(self, suffix: str) -> list[Path]:
        # Not by glob, which takes a folder that cannot be read for an empty one, or raises
        # what nobody expects, such as that there are no file descriptors left.
        try:
            paths = sorted(self._directory.iterdir())
        except OSError as exc:
            raise ConfigError(
                f"PERSIA_KEYS: cannot read the folder {self._directory}: {exc.strerror}"
            ) from exc
        return [path for path in paths if path.suffix == suffix and path.name[0] != "."]


def _read(path: Path) -> bytes:
    try:
        text = path.read_bytes().strip()
    except OSError as exc:
        raise ConfigError(f"PERSIA_KEYS: expected a key at {path}: {exc.strerror}") from exc
    try:
        key = z85.decode(text)
    except (KeyError, ValueError, ArithmeticError) as exc:
        raise ConfigError(f"{path}: expected a key of 40 characters of Z85") from exc
    if len(key) != _BYTES:
        raise ConfigError(f"{path}: expected a key of {_BYTES} bytes, got {len(key)}")
    return key


def _write(path: Path, key: bytes, mode: int, owner: int | None) -> None:
    """Write a key that is there whole or not at all: a server reads the folder as it runs."""
    part = path.with_name(f".{path.name}.part")
    try:
        part.touch(0o600, exist_ok=False)
        part.write_bytes(key + b"\n")
        part.chmod(mode)
        if owner is not None:
            os.chown(part, owner, -1)
        part.rename(path)
    except OSError:
        part.unlink(missing_ok=True)
        raise


def make_keys(
    directory: Path, names: Sequence[str] = (SERVER, CONTROL, DATA), owner: int | None = None
) -> list[Path]:
    """Make a pair of keys for each name; secret ones are for their owner to read only.

    Args:
        directory: Made if it is not there.
        names: Whose.
        owner: The user to give them to; only root may.

    Returns:
        The files.

    Raises:
        ConfigError: If a file is there already, or cannot be written; nothing of a pair that is
            there is changed.
    """
    files = {}
    for name in names:
        if not name or not all(c.isalnum() or c in "-_" for c in name):
            raise ConfigError(f"expected a name of letters, digits, - and _, got {name!r}")
        public, secret = zmq.curve_keypair()
        files[directory / f"{name}{_PUBLIC}"] = (public, 0o644)
        files[directory / f"{name}{_SECRET}"] = (secret, 0o600)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        there = next((path for path in files if path.exists()), None)
        if there is not None:
            raise ConfigError(f"{there}: there is a key already; it is not replaced")
        for path, (key, mode) in files.items():
            _write(path, key, mode, owner)
    except OSError as exc:
        raise ConfigError(f"cannot write keys into {directory}: {exc}") from exc
    return list(files)
