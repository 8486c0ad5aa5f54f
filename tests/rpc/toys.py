"""Servers and clients of the toy role that close behind themselves."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from persia._rpc.client import Client
from persia._rpc.server import Server, ServerSettings, serve
from tests.rpc.support import PATIENCE_S, TOY, ToyService, Wire


@contextlib.contextmanager
def make_client(wire: Wire, server: Server | str, **options: Any) -> Iterator[Client]:
    address = server if isinstance(server, str) else server.address
    client = Client(
        wire.transport, address, TOY, **({"timeout_s": PATIENCE_S, "replica": 0} | options)
    )
    try:
        yield client
    finally:
        client.close()


@contextlib.contextmanager
def toy_server(
    wire: Wire, address: str | None = None, **settings: int
) -> Iterator[tuple[Server, ToyService]]:
    service = ToyService()
    options = {"settings": ServerSettings(**settings)}
    server = serve(wire.transport, address or wire.address(), TOY, service, **options)
    try:
        yield server, service
    finally:
        service.permits.release(1000)
        server.stop()


@contextlib.contextmanager
def toy(wire: Wire) -> Iterator[tuple[Client, ToyService]]:
    """A client that has met its server, and what serves it."""
    with toy_server(wire) as (server, service), make_client(wire, server) as client:
        client.hello()
        yield client, service
