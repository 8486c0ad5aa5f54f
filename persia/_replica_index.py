"""``REPLICA_INDEX=auto``: the number of this replica, from its host name or its network.

    host name ends in -<n>     a pod of a StatefulSet or JobSet: n
    else                       a container of Compose: its number less one, from the name
                               that its network has for its own address

    172.18.0.4 --PTR--> persia-embedding_worker-2.persia_cluster --> 1

The network's name server is asked directly: ``socket.gethostbyaddr`` reads /etc/hosts first,
where a container finds its own host name, twelve hexadecimal digits.
"""

from __future__ import annotations

import contextlib
import ipaddress
import re
import secrets
import socket
import struct
from collections.abc import Callable, Sequence
from pathlib import Path

from persia.errors import ConfigError

_RESOLV_CONF = Path("/etc/resolv.conf")
_PORT = 53
# Seconds of one question, and how often it is asked: datagrams may be lost.
_ATTEMPT_S = 2.0
_NUM_ATTEMPTS = 3
_PTR, _IN = 12, 1
_RECURSION = 0x0100
_MAX_ANSWER = 4096
_MAX_LABELS = 128

_ORDINAL = re.compile(r".*-(\d+)")
# Compose puts a dash before the number, its first version an underscore.
_NUMBER = re.compile(r".*[-_](\d+)")


def own_number(
    host: str | None = None, names_of: Callable[[str], Sequence[str]] | None = None
) -> int:
    """Return the number of this replica, from 0; host name and network are others in tests.

    Raises:
        ConfigError: If neither the host name nor the network's names end in a number.
    """
    host = socket.gethostname() if host is None else host
    ordinal = _ORDINAL.fullmatch(host.partition(".")[0])
    if ordinal:
        return int(ordinal[1])
    names = (names_of or _network_names)(host)
    for name in names:
        number = _NUMBER.fullmatch(name.partition(".")[0])
        if number and int(number[1]) > 0:
            return int(number[1]) - 1
    raise ConfigError(
        f"REPLICA_INDEX=auto: expected the host name to end in -<n> (a StatefulSet or JobSet), "
        f"or a container's name that does (Compose), got host {host!r}, known to the network "
        f"as {', '.join(names) or 'nothing'}; set REPLICA_INDEX to a number"
    )


def _network_names(host: str) -> list[str]:
    """Return what the network calls this host's addresses."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    names = []
    for address in sorted({str(place[0]).partition("%")[0] for *_, place in found}):
        with contextlib.suppress(OSError, ValueError):
            names.append(name_of(address, name_server()))
    return names


def name_server(config: Path = _RESOLV_CONF) -> str:
    """Return the first name server of the system.

    Raises:
        OSError: If none is named.
    """
    for line in config.read_text().splitlines():
        words = line.split()
        if len(words) > 1 and words[0] == "nameserver":
            return words[1]
    raise OSError(f"{config} names no name server")


def name_of(address: str, server: str, port: int = _PORT) -> str:
    """Return the name that a name server has for an address.

    Raises:
        OSError: If the server does not answer.
        ValueError: If its answer is none, or has no name.
    """
    asked = ipaddress.ip_address(address).reverse_pointer.split(".")
    number = secrets.randbits(16)
    query = struct.pack(">6H", number, _RECURSION, 1, 0, 0, 0)
    query += b"".join(bytes([len(label)]) + label.encode() for label in asked)
    query += struct.pack(">x2H", _PTR, _IN)
    family = socket.AF_INET6 if ":" in server else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as wire:
        wire.settimeout(_ATTEMPT_S)
        wire.connect((server, port))  # the kernel drops datagrams of other senders
        for _ in range(_NUM_ATTEMPTS - 1):
            wire.send(query)
            with contextlib.suppress(TimeoutError):
                return _read_answer(wire.recv(_MAX_ANSWER), number)
        wire.send(query)
        return _read_answer(wire.recv(_MAX_ANSWER), number)


def _read_answer(answer: bytes, number: int) -> str:
    """Return the first PTR name of a DNS message."""
    try:
        got, _, num_questions, num_answers = struct.unpack_from(">4H", answer)
        if got != number:
            raise ValueError(f"an answer to another question: {got}, expected {number}")
        place = 12
        for _ in range(num_questions):
            _, place = _read_name(answer, place)
            place += 4
        for _ in range(num_answers):
            _, place = _read_name(answer, place)
            kind, _, _, length = struct.unpack_from(">HHIH", answer, place)
            place += 10
            if kind == _PTR:
                return _read_name(answer, place)[0]
            place += length
    except (struct.error, IndexError) as exc:
        raise ValueError(f"unreadable answer of {len(answer)} bytes") from exc
    raise ValueError("the name server knows no name")


def _read_name(message: bytes, place: int) -> tuple[str, int]:
    """Return the name at a place, and the place behind it; names may end in a pointer."""
    labels: list[str] = []
    behind: int | None = None
    for _ in range(_MAX_LABELS):
        length = message[place]
        if length >= 0xC0:
            behind = place + 2 if behind is None else behind
            (pointer,) = struct.unpack_from(">H", message, place)
            place = pointer & 0x3FFF
        elif length:
            labels.append(message[place + 1 : place + 1 + length].decode("ascii", "replace"))
            place += 1 + length
        else:
            return ".".join(labels), place + 1 if behind is None else behind
    raise ValueError(f"a name of more than {_MAX_LABELS} labels")
