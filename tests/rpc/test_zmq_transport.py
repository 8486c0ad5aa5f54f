"""Addresses that are taken or unreadable, and what closing releases."""

from __future__ import annotations

import gc
import threading
from pathlib import Path

import numpy as np
import pytest

from persia._rpc.messages import TableSigns
from persia._rpc.server import Server
from persia.errors import ConfigError, ServiceUnavailable
from tests.rpc.support import TOY, ToyService, Wire
from tests.support.waiting import until


def test_addresses_in_use_are_refused(wire: Wire) -> None:
    server, _ = wire.serve_toy()
    with pytest.raises(ConfigError, match="process listens there") as caught:
        wire.transport.listen(server.address)
    assert wire.kind == "ipc" or "PERSIA_EMBEDDING_WORKERS" in str(caught.value)
    assert wire.client(server).call("add", 1) == 1


@pytest.mark.parametrize(
    "address",
    ["", "nowhere", "udp://a:1", "tcp://a", "tcp://:1", "a:b", "a:65536", "ipc://" + "x" * 108],
)
def test_addresses_that_cannot_be_read(wire: Wire, address: str) -> None:
    with pytest.raises(ConfigError, match=r"expected"):
        wire.transport.connect(address)
    with pytest.raises(ConfigError, match=r"expected"):
        wire.transport.listen(address)


def test_an_address_that_is_not_here(wire: Wire) -> None:
    with pytest.raises(ConfigError, match=r"cannot listen at tcp://192\.0\.2\.1:0"):
        wire.transport.listen("192.0.2.1:0")
    with pytest.raises(ConfigError, match="cannot listen at ipc:///nowhere"):
        wire.transport.listen("ipc:///nowhere/at/all")


def test_fifty_starts_and_stops_leave_no_thread_and_no_socket(tmp_path: Path) -> None:
    def cycle(number: int) -> None:
        wire = Wire("ipc" if number % 2 else "tcp", tmp_path)
        Server(wire.transport, wire.address(), TOY, ToyService()).stop()  # never started
        server, _ = wire.serve_toy(f"ipc://{tmp_path}/one" if number % 2 else None)
        # Large enough to be sent without a copy, which starts pyzmq's collector.
        large = [TableSigns(0, np.zeros(1 << 16, "u8"))]
        assert len(wire.client(server).call("echo", large)) == 1
        with pytest.raises(ServiceUnavailable):
            wire.client(f"ipc://{tmp_path}/free", timeout_s=0.0).call("add", 1)
        wire.close()

    def left() -> tuple[set[str], int]:
        gc.collect()
        num_open = len(list(Path("/proc/self/fd").iterdir()))
        return {thread.name for thread in threading.enumerate()}, num_open

    others, _ = left()
    for number in range(2):
        cycle(number)
    until(lambda: not [name for name in left()[0] - others if name.startswith("persia-")])
    before = left()
    for number in range(50):
        cycle(number)
    until(lambda: left() == before, details=lambda: f"{left()}, {before}")
