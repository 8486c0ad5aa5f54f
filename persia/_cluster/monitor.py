"""Servers behind a name of several hosts, found again when they come back at another host.

A name of one host is left to ZeroMQ, which looks it up at each connection. One of several does
not say which replica is where, so each host was asked once, and its server is called by number.
A thread checks every few seconds that each server is at its address. One that is not is sought
among the hosts of the name.
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

# Seconds between two checks, and of each call.
_CHECK_S = 3.0

Found = Sequence[tuple[Client, Hello]]


def start_monitor(transport: Transport, role: Role, listed: AddressList, found: Found) -> None:
    """Check servers in a thread until their clients are closed."""
    threading.Thread(
        target=_monitor,
        args=(transport, role, listed, found),
        name=f"persia-monitor {role.name}",
        daemon=True,
    ).start()


def _monitor(transport: Transport, role: Role, listed: AddressList, found: Found) -> None:
    # Clients are closed together, and before their transport is.
    restarts: dict[int, threading.Thread] = {}
    while not found[0][0].wait_closed(_CHECK_S):
        try:
            _check_all(transport, role, listed, found, restarts)
        except Exception:
            if not found[0][0].wait_closed(0.0):
                raise


def _check_all(
    transport: Transport,
    role: Role,
    listed: AddressList,
    found: Found,
    restarts: dict[int, threading.Thread],
) -> None:
    lost = {
        hello.replica_index: client
        for client, hello in found
        if not _is_there(client, hello, restarts)
    }
    if lost:
        taken = {client.address for client, _ in found if client not in lost.values()}
        for address in resolved(listed, _CHECK_S):
            if address not in taken:
                _probe(transport, role, address, lost, found[0][1].replica_size)


def _report_restart(
    client: Client, hello: Hello, restarts: dict[int, threading.Thread]
) -> None:
    """Let the client find another process, which calls ``on_restart``.

    In a thread of its own: that may take long, the process may be gone again meanwhile, and
    only the monitor finds out where it is then.
    """
    number = hello.replica_index
    if number not in restarts or not restarts[number].is_alive():
        restarts[number] = threading.Thread(
            target=_say_hello, args=(client,), name=f"persia-restart {number}", daemon=True
        )
        restarts[number].start()


def _say_hello(client: Client) -> None:
    with contextlib.suppress(ServiceError, ConfigError):
        client.hello(_CHECK_S)


def _is_there(client: Client, hello: Hello, restarts: dict[int, threading.Thread]) -> bool:
    try:
        now = client.probe(_CHECK_S)
        if now.incarnation != client.incarnation:
            _report_restart(client, hello, restarts)
        return now.replica_size == hello.replica_size
    except ServiceTimeout:
        return True  # there is a connection: a process that hangs has not moved
    except ServiceUnavailable:
        return client.wait_closed(0.0)
    except ConfigError:
        return False  # another server has got its host


def _probe(
    transport: Transport, role: Role, address: str, lost: dict[int, Client], size: int
) -> None:
    """Ask at an address, and move the client of a lost server there if it is that server."""
    probe = Client(transport, address, role)
    with contextlib.closing(probe), contextlib.suppress(ServiceError, ConfigError):
        hello = probe.hello(_CHECK_S)
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
