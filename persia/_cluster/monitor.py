"""Servers behind a name of several hosts, found again when they come back at another.

A name of one host is ZeroMQ's matter: it is looked up again whenever a connection is made. One
of several says nothing of who is where, so each host was asked once, and its server is called
by number. A thread asks now and then whether they are still there. One that is not is looked
for among the hosts to which the name leads now.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Sequence

from persia._cluster.addresses import AddressList, resolved
from persia._rpc.client import Client
from persia._rpc.methods import Hello, Role
from persia._rpc.transport import Transport
from persia.errors import ConfigError, ServiceError, ServiceTimeout, ServiceUnavailable

logger = logging.getLogger(__name__)

# Seconds between two looks, and of each question.
_LOOK_S = 3.0

Found = Sequence[tuple[Client, Hello]]


def follow(transport: Transport, role: Role, listed: AddressList, found: Found) -> None:
    """Watch over servers until their clients are closed."""
    threading.Thread(
        target=_follow,
        args=(transport, role, listed, found),
        name=f"persia-follow {role.name}",
        daemon=True,
    ).start()


def _follow(transport: Transport, role: Role, listed: AddressList, found: Found) -> None:
    # They are closed together, and before their transport is.
    settling: dict[int, threading.Thread] = {}
    while not found[0][0].wait_closed(_LOOK_S):
        try:
            _look(transport, role, listed, found, settling)
        except Exception:
            if not found[0][0].wait_closed(0.0):
                raise


def _look(
    transport: Transport,
    role: Role,
    listed: AddressList,
    found: Found,
    settling: dict[int, threading.Thread],
) -> None:
    lost = {
        hello.replica_index: client
        for client, hello in found
        if not _is_there(client, hello, settling)
    }
    if lost:
        taken = {client.address for client, _ in found if client not in lost.values()}
        for address in resolved(listed, _LOOK_S):
            if address not in taken:
                _try(transport, role, address, lost, found[0][1].replica_size)


def _settle(client: Client, hello: Hello, settling: dict[int, threading.Thread]) -> None:
    """Have another process dealt with, in a thread of its own: that may take long.

    It may be gone again meanwhile, and only this one here finds out where it is then.
    """
    number = hello.replica_index
    if number not in settling or not settling[number].is_alive():
        settling[number] = threading.Thread(
            target=_ask, args=(client,), name=f"persia-settle {number}", daemon=True
        )
        settling[number].start()


def _ask(client: Client) -> None:
    with contextlib.suppress(ServiceError, ConfigError):
        client.hello(_LOOK_S)


def _is_there(client: Client, hello: Hello, settling: dict[int, threading.Thread]) -> bool:
    try:
        now = client.who(_LOOK_S)
        if now.incarnation != client.incarnation:
            _settle(client, hello, settling)
        return now.replica_size == hello.replica_size
    except ServiceTimeout:
        return True  # there is a connection; who stands still is not elsewhere
    except ServiceUnavailable:
        return client.wait_closed(0.0)
    except ConfigError:
        return False  # another server has got its host


def _try(
    transport: Transport, role: Role, address: str, lost: dict[int, Client], size: int
) -> None:
    """Ask who is at an address, and move the client of a lost server there if it is that."""
    probe = Client(transport, address, role)
    with contextlib.closing(probe), contextlib.suppress(ServiceError, ConfigError):
        hello = probe.hello(_LOOK_S)
        client = lost.get(hello.replica_index)
        if client is None or hello.replica_size != size or client.wait_closed(0.0):
            return
        if client.address != address:
            logger.warning(
                "%s %d is now at %s, and no more at %s",
                role.name,
                hello.replica_index,
                address,
                client.address,
            )
            client.move(address)
        del lost[hello.replica_index]
