"""Who may ask a server what: where it listens, its tokens, and its control routes."""

from __future__ import annotations

import contextlib
import hmac
import ipaddress
import threading
import time
from enum import IntEnum
from pathlib import Path

from persia import env
from persia.errors import ConfigError, NotAllowed

# Seconds between two looks at a token's file.
_LOOK_S = 1.0
_MOST_TOKEN_BYTES = 4096


class Need(IntEnum):
    """What a route asks of its caller."""

    NOTHING = 0  # health
    TOKEN = 1  # inference, metadata, statistics
    CONTROL = 2  # index, load, unload


class TokenFile:
    """A file of one line; a token that replaces it is taken within a second.

    Raises:
        ConfigError: It cannot be read, or holds no token of at least 16 characters.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._token = self._read()
        self._looked_at = time.monotonic()

    def matches(self, token: bytes) -> bool:
        """Whether this is the token; takes the same time whatever is wrong with it."""
        now = time.monotonic()
        with self._lock:
            if now - self._looked_at > _LOOK_S:
                self._looked_at = now
                # While it is being replaced, the token that was read last holds.
                with contextlib.suppress(ConfigError):
                    self._token = self._read()
        return hmac.compare_digest(self._token, token)

    def _read(self) -> bytes:
        try:
            with self._path.open("rb") as file:
                token = file.read(_MOST_TOKEN_BYTES).strip()
        except OSError as error:
            raise ConfigError(f"{self._path}: cannot read a token: {error.strerror}") from error
        if len(token) < 16:
            raise ConfigError(f"{self._path}: expected a token of at least 16 characters")
        return token


class AccessPolicy:
    """Checks the ``Authorization`` header of requests.

    Args:
        token_file: Of the token that callers show; None: they need none.
        control_token_file: Of the token for control; None: nothing is controlled from outside.
    """

    def __init__(
        self, token_file: Path | None = None, control_token_file: Path | None = None
    ) -> None:
        self._token = TokenFile(token_file) if token_file else None
        self._control = TokenFile(control_token_file) if control_token_file else None

    @property
    def is_open(self) -> bool:
        """Whether inference needs no token."""
        return self._token is None

    def check(self, need: Need, authorization: str) -> None:
        """Raise ``NotAllowed`` unless the header is enough."""
        if need == Need.NOTHING or (need == Need.TOKEN and self._token is None):
            return
        if need == Need.CONTROL and self._control is None:
            raise NotAllowed("control is off: the server was started without a control token")
        scheme, _, token = authorization.partition(" ")
        shown = token.strip().encode("utf-8", "surrogateescape")
        if scheme.lower() != "bearer" or not shown:
            raise NotAllowed("expected a header `Authorization: Bearer TOKEN`")
        if self._control is not None and self._control.matches(shown):
            return
        if need == Need.TOKEN and self._token is not None and self._token.matches(shown):
            return
        raise NotAllowed("the token is not one for this call")


def check_listening(host: str, *, has_tls: bool, has_token: bool) -> None:
    """Refuse to listen beyond this host where any stranger could ask.

    Raises:
        ConfigError: Without TLS, a token, or PERSIA_LISTEN_WITHOUT_KEYS=1.
    """
    if is_loopback(host) or has_tls or has_token or env.may_listen_without_keys():
        return
    raise ConfigError(
        f"cannot listen at {host} for anyone: give --tls-cert and --tls-key, or --token-file, "
        "or listen at 127.0.0.1; in a network that no stranger can enter, "
        "PERSIA_LISTEN_WITHOUT_KEYS=1"
    )


def is_loopback(host: str) -> bool:
    """Whether only processes of this machine reach an address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
