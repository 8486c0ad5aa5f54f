"""Addresses as they are listed, and the hosts of names among them."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

TCP = "tcp://"


@dataclass(frozen=True, slots=True)
class AddressList:
    variable: str
    addresses: list[str]  # with their scheme
    is_by_node: bool = False  # a list shorter than the set is one of nodes


def split(address: str) -> tuple[str, int]:
    host, _, port = address.removeprefix(TCP).rpartition(":")
    return host, int(port)


def is_name(address: str) -> bool:
    """Whether its host is a name, which may lead to other hosts later."""
    if not address.startswith(TCP):
        return False
    try:
        ipaddress.ip_address(split(address)[0].strip("[]"))
    except ValueError:
        return True
    return False


def hosts(name: str) -> list[str]:
    """Return the addresses of a name's hosts, each with the number of its host.

    Raises:
        OSError: If the name is not known now.
    """
    host, port = split(name)
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    by_family = {
        family: sorted({str(place[0]) for of, *_, place in found if of == family})
        for family in (socket.AF_INET, socket.AF_INET6)
    }
    # A name with addresses of both kinds names the same hosts twice.
    if by_family[socket.AF_INET]:
        return [f"{TCP}{one}:{port}" for one in by_family[socket.AF_INET]]
    return [f"{TCP}[{one}]:{port}" for one in by_family[socket.AF_INET6]]


def resolve(name: str) -> list[str]:
    """Return as ``hosts``, but the name itself if it has one host, by IPv4.

    ZeroMQ looks it up again whenever it connects again.
    """
    found = hosts(name)
    return [name] if len(found) == 1 and "[" not in found[0] else found


def resolved(
    addresses: Sequence[str],
    timeout_s: float,
    hosts_of: Callable[[str], list[str]] = resolve,
) -> list[str]:
    """Return every address, with the hosts of those names that can be looked up in time."""
    found: dict[str, list[str]] = {}

    def look_up(name: str) -> None:
        # A name that is not known has no host that could be asked.
        with contextlib.suppress(OSError, UnicodeError):
            found[name] = hosts_of(name)

    names = [address for address in addresses if is_name(address)]
    # Threads that are left behind, because only the system ends a look-up.
    threads = [threading.Thread(target=look_up, args=(name,), daemon=True) for name in names]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + timeout_s
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    known = dict(found)
    return [
        address
        for entry in addresses
        for address in known.get(entry, [] if entry in names else [entry])
    ]
