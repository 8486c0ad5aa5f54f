"""CURVE: the key files of a process, and the check of a peer's key at each handshake.

``docs/security.md`` has the files. A process finds its keys in one directory; the directories
of two roles may differ. It connects with ``control.secret`` if that is there, else with the one
other secret. A ``.public`` beside ``server.secret`` is a user's, and its stem the user's name.

At each handshake libzmq asks by ZAP (ZeroMQ's RFC 27) whether the peer's key is known:

    listener's socket --handshake--> libzmq's thread --inproc--> CurveAuthenticator's thread

The public keys are read again at each handshake, which costs less than the handshake itself,
so a file that is added or removed takes effect from then on. While a file cannot be read,
every peer is refused; peers retry by themselves.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import zmq
from zmq.utils import z85

from persia.errors import ConfigError

logger = logging.getLogger(__name__)

SERVER, CONTROL, DATA, SERVE = "server", "control", "data", "serve"

KEY_NAMES = (SERVER, CONTROL, DATA, SERVE)  # of a job

_PUBLIC, _SECRET = ".public", ".secret"
_KEY_BYTES = 32

# ZAP: the address is fixed by the RFC, so a context has one authenticator at most.
_ZAP_ADDRESS = "inproc://zeromq.zap.01"
_ZAP_DOMAIN = b"persia"
_ZAP_VERSION = b"1.0"
_CURVE = b"CURVE"
_JOIN_S = 2.0
_OK, _REFUSED = (b"200", b"OK"), (b"400", b"unknown key")


def is_for_serving(user: str) -> bool:
    """Return whether a user's key may only look up: ``serve``, or ``serve-`` and a name."""
    return user == SERVE or user.startswith(f"{SERVE}-")


class Keys:
    """The keys in a directory, each read when it is needed.

    Each method raises a ConfigError if a file is missing or holds no key.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def server_secret(self) -> bytes:
        """Return the secret key to listen with."""
        return _read(self._directory / f"{SERVER}{_SECRET}")

    def server_public(self) -> bytes:
        """Return the public key that a server must prove to have."""
        return _read(self._directory / f"{SERVER}{_PUBLIC}")

    def client_secret(self) -> bytes:
        """Return the secret key to connect with; ConfigError if the choice is ambiguous."""
        paths = {path.stem: path for path in self._paths(_SECRET)}
        # A server's folder holds its secret too; it never connects with that.
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
        """Return the names of the users that may connect, by public key; no two share one."""
        users: dict[bytes, str] = {}
        for path in self._paths(_PUBLIC):
            # The server's own key is no user's.
            if path.stem == SERVER:
                continue
            key = _read(path)
            if key in users:
                raise ConfigError(f"{path}: expected a key of its own, it is {users[key]}'s")
            users[key] = path.stem
        # An empty list would refuse everyone silently: more likely a wrong folder.
        if not users:
            raise ConfigError(
                f"PERSIA_KEYS: expected a user's public key in {self._directory}, found none "
                "but the server's"
            )
        return users

    def _paths(self, suffix: str) -> list[Path]:
        # Not by glob, which returns nothing for a folder that cannot be read, and lets errors
        # such as EMFILE escape as they are.
        try:
            paths = sorted(self._directory.iterdir())
        except OSError as exc:
            raise ConfigError(
                f"PERSIA_KEYS: cannot read the folder {self._directory}: {exc.strerror}"
            ) from exc
        return [path for path in paths if path.suffix == suffix and path.name[0] != "."]


class CurveAuthenticator:
    """Admits peers with a known key to the listeners of one context, until that is terminated.

    pyzmq's own authenticator is not used: it logs its failures and goes on, where here one
    ends the process. A key that cannot be read is a ConfigError.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], keys: Keys) -> None:
        self._secret = keys.server_secret()
        self._keys = keys
        # Read here as well, so that a missing key fails at the start and not at a handshake.
        self._logged_users = sorted(keys.users().values())
        self._socket = context.socket(zmq.ROUTER)
        # Otherwise Context.term() would wait for replies to handshakes.
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(_ZAP_ADDRESS)
        self._thread = threading.Thread(target=self._run, name="persia-keys", daemon=True)
        self._thread.start()

    def protect(self, socket: zmq.Socket[bytes]) -> None:
        """Have a socket, before it is bound, ask here about each peer."""
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self._secret)
        socket.setsockopt(zmq.ZAP_DOMAIN, _ZAP_DOMAIN)
        # Without this libzmq admits every peer that can encrypt once the thread below is gone.
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)

    def close(self) -> None:
        """Wait for the thread, which ends with the context: terminate that first."""
        self._thread.join(_JOIN_S)

    def _run(self) -> None:
        # An exception goes to threading.excepthook, which ends a server's process. The socket
        # is closed by then, so every peer is refused.
        try:
            while True:
                self._reply(self._socket.recv_multipart())
        except zmq.ContextTerminated:
            pass
        finally:
            self._socket.close()

    def _reply(self, request: list[bytes]) -> None:
        """Reply to one request of libzmq's; only its last part comes from the peer."""
        # The unused ones are the peer's IP address and routing id.
        peer, empty, version, number, domain, _, _, mechanism, *credentials = request
        user = None
        is_ours = (version, domain, mechanism) == (_ZAP_VERSION, _ZAP_DOMAIN, _CURVE)
        if is_ours and len(credentials) == 1:
            user = self._users().get(credentials[0])
        code, text = _REFUSED if user is None else _OK
        name = (user or "").encode()
        # libzmq attaches the name to each message of the peer, as its User-Id.
        self._socket.send_multipart([peer, empty, version, number, code, text, name, b""])

    def _users(self) -> Mapping[bytes, str]:
        """Return the users that may connect now, and log a change of them."""
        users: Mapping[bytes, str] = {}
        try:
            users = self._keys.users()
            names = sorted(users.values())
        except ConfigError as error:
            names = [f"none: {error}"]
        if names != self._logged_users:
            self._logged_users = names
            logger.warning("users that may connect from now on: %s", ", ".join(names))
        return users


def _read(path: Path) -> bytes:
    try:
        text = path.read_bytes().strip()
    except OSError as exc:
        raise ConfigError(f"PERSIA_KEYS: expected a key at {path}: {exc.strerror}") from exc
    try:
        key = z85.decode(text)
    except (KeyError, ValueError, ArithmeticError) as exc:
        raise ConfigError(f"{path}: expected a key of 40 characters of Z85") from exc
    # z85.decode accepts any multiple of five characters.
    if len(key) != _KEY_BYTES:
        raise ConfigError(f"{path}: expected a key of {_KEY_BYTES} bytes, got {len(key)}")
    return key


def _write(path: Path, key: bytes, mode: int, owner: int | None) -> None:
    """Write a key file atomically: a running server reads the folder at any time."""
    # Hidden, and renamed when whole: users() skips names that begin with a dot.
    part = path.with_name(f".{path.name}.part")
    try:
        # Private before the key is written: a umask may allow others to read new files.
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
    directory: Path, names: Sequence[str] = KEY_NAMES, owner: int | None = None
) -> list[Path]:
    """Make a key pair for each name, and the directory; only its owner can read a secret key.

    ``owner`` is a uid to give the files to, as only root may. Returns the files. Existing ones
    are never changed: that is a ConfigError.
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
        existing = next((path for path in files if path.exists()), None)
        if existing is not None:
            raise ConfigError(f"{existing}: the key exists already and is not replaced")
        for path, (key, mode) in files.items():
            _write(path, key, mode, owner)
    except OSError as exc:
        raise ConfigError(f"cannot write keys into {directory}: {exc}") from exc
    return list(files)
