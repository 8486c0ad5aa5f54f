"""A call says for which replica it is: addresses move between hosts, calls do not."""

from __future__ import annotations

import contextlib
import math
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgpack  # type: ignore[import-untyped]
import pytest

from persia._rpc import client as client_module
from persia._rpc.client import Client
from persia._rpc.frame import Call, UnreadableFrame, decode, encode
from persia._rpc.server import serve
from persia.errors import ConfigError, ServiceBusy, WrongReplica
from tests.rpc.conftest import WAITING
from tests.rpc.support import PATIENCE_S, TOY, ToyService, Wire


def test_the_number_is_in_the_header_if_it_is_known() -> None:
    for call in (Call(1, "add", 5, [1]), Call(1, "add", 5, [1], (), 7)):
        assert decode(encode(call)) == call
    headers = [msgpack.unpackb(encode(Call(1, "add", 5, [1], (), r))[1]) for r in (None, 0)]
    assert headers[1] == headers[0] | {"r": 0}
    assert "r" not in headers[0]


@pytest.mark.parametrize("number", [-1, 1 << 32, True, "0", 1.0])
def test_a_number_that_is_none_is_refused(number: object) -> None:
    parts = encode(Call(1, "add", 5, [1]))
    bad = Call(1, "add", 5, [1], (), number)  # type: ignore[arg-type]
    with pytest.raises(UnreadableFrame, match="r: expected an integer in 0"):
        decode([parts[0], encode(bad)[1]])


@WAITING
def test_another_replica_at_the_address_does_nothing(wire: Wire) -> None:
    """Neither what was asked, nor what is done for a server that was started anew."""
    restarts: list[int] = []
    services = [ToyService(), ToyService(), ToyService()]
    first = serve(wire.transport, wire.address(), TOY, services[0], replica_size=2)
    client = Client(
        wire.transport,
        first.address,
        TOY,
        timeout_s=PATIENCE_S,
        on_restart=lambda: restarts.append(1),
    )
    with contextlib.closing(client), ThreadPoolExecutor(1) as pool:
        assert client.hello().replica_index == 0
        assert client.call("add", 1) == 1
        known = client.incarnation
        first.stop()
        other = serve(
            wire.transport, first.address, TOY, services[1], replica_index=1, replica_size=2
        )
        with pytest.raises(WrongReplica, match="for replica 0, at its address is toy 1 now"):
            client.call("add", 2, timeout_s=1.0)
        with pytest.raises(ConfigError, match="expected toy 0, found 1 of 2"):
            client.hello()
        assert (services[1].calls, restarts, client.incarnation) == ([], [], known)
        assert other.stats()["bad.replica"] >= 1
        # A call that waits goes on where the right one is found.
        waiting = pool.submit(client.call, "add", 3)
        back = serve(wire.transport, wire.address(), TOY, services[2], replica_size=2)
        client.move(back.address)
        assert waiting.result(PATIENCE_S) == 3
        assert (services[1].calls, services[2].calls) == ([], [("add", 3)])
        assert restarts == [1]
    for server in (other, back):
        server.stop()


def test_who_is_there_is_told_while_a_new_process_is_dealt_with(wire: Wire) -> None:
    """It may be gone again meanwhile: whoever looks for it elsewhere must not wait for that."""
    begun, moved = threading.Event(), threading.Event()

    def configure() -> None:
        begun.set()
        client.call("add", 7)  # as long as a call may take

    services = [ToyService(), ToyService(), ToyService()]
    first = serve(wire.transport, wire.address(), TOY, services[0])
    client = Client(
        wire.transport, first.address, TOY, timeout_s=PATIENCE_S, on_restart=configure
    )
    with contextlib.closing(client), ThreadPoolExecutor(2) as pool:
        assert client.call("add", 1) == 1
        first.stop()
        second = serve(wire.transport, first.address, TOY, services[1])
        assert client.who(PATIENCE_S).incarnation == second.hello.incarnation
        assert not begun.is_set()  # it is the next call's to deal with it
        holds: Any = lambda number: moved.wait(PATIENCE_S) and number  # noqa: E731
        services[1].add = holds  # type: ignore[method-assign]
        calling = pool.submit(client.call, "fill", 1)
        assert begun.wait(PATIENCE_S)
        found = pool.submit(client.who, 5.0).result(PATIENCE_S / 2)
        assert found.incarnation == second.hello.incarnation
        third = serve(wire.transport, wire.address(), TOY, services[2])
        client.move(third.address)
        moved.set()
        calling.result(PATIENCE_S)
        assert ("add", 7) in services[2].calls
        assert client.incarnation == third.hello.incarnation
    for server in (second, third):
        server.stop()


def test_who_has_asked_nobody_calls_whoever_is_there(
    wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve(
        wire.transport, wire.address(), TOY, ToyService(), replica_index=3, replica_size=4
    )
    with contextlib.closing(
        Client(wire.transport, server.address, TOY, timeout_s=PATIENCE_S)
    ) as client:
        assert client.call("add", 1) == 1
    # A refusal is told at once, whatever the deadline.
    monkeypatch.setattr(client_module, "_FIRST_PAUSE_S", math.inf)
    wrong = Client(wire.transport, server.address, TOY, replica=2, timeout_s=PATIENCE_S)
    with contextlib.closing(wrong), pytest.raises(ServiceBusy, match="for replica 2"):
        wrong.call("add", 1)
    server.stop()
