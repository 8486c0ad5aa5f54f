"""A transport, servers that answer only ``hello``, and names that lead to hosts."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from persia._cluster.connect import connect_parameter_servers
from persia._rpc.codec import FLOAT32
from persia._rpc.messages import WireDtypes
from persia._rpc.methods import Role, parameter_server
from persia._rpc.server import Server
from tests.rpc.support import Wire
from tests.support.fixtures import Monkey as Monkey
from tests.support.waiting import PATIENCE_S


class Place:
    """A transport, and servers that answer nothing but ``hello``."""

    def __init__(self, directory: Path) -> None:
        self._wire = Wire("ipc", directory)
        self.transport = self._wire.transport
        self.directory = directory
        self.servers: list[Server] = []

    def ipc(self, name: str | int) -> str:
        return f"ipc://{self.directory}/{name}"

    def serve(
        self,
        number: int,
        size: int,
        address: str = "",
        *,
        role: Role | None = None,
        fingerprint: str = "f",
        wire: WireDtypes = FLOAT32,
    ) -> Server:
        server = self._wire.serve(
            object(),
            address or self.ipc(number),
            role=role or parameter_server(),
            replica_index=number,
            replica_size=size,
            schema_fingerprint=fingerprint,
            wire=wire,
        )
        self.servers.append(server)
        return server

    def __enter__(self) -> Place:
        return self

    def __exit__(self, *_: object) -> None:
        self._wire.close()

    def at_hosts(self, *numbers: int, size: int) -> int:
        """Serve numbers of a set at 127.0.0.1, 127.0.0.2, ...; returns the port."""
        port = 0
        for host, number in enumerate(numbers, start=1):
            server = self.serve(number, size, f"tcp://127.0.0.{host}:{port}")
            port = int(server.address.rpartition(":")[2])
        return port

    @contextmanager
    def connected(
        self,
        *listed: str,
        connect: Callable[..., list[Any]] = connect_parameter_servers,
        **of: Any,
    ) -> Iterator[list[Any]]:
        found = connect(self.transport, addresses=listed, **{"timeout_s": PATIENCE_S, **of})
        try:
            yield found
        finally:
            for server in found:
                server.close()

    def find(self, *listed: str, **options: Any) -> list[int]:
        """The numbers of the servers that are found."""
        with self.connected(*listed, **options) as found:
            return [server.replica_index for server in found]


def hosts_of(monkeypatch: Monkey, led: dict[str, list[str]]) -> None:
    """Make names lead to hosts; what is not named is not known."""

    def look_up(host: str, port: int, *_: object, **__: object) -> list[Any]:
        if not led.get(host):
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        kind = socket.SOCK_STREAM
        return [
            (socket.AF_INET6 if ":" in one else socket.AF_INET, kind, 0, "", (one, port))
            for one in led[host]
        ]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
