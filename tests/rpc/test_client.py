"""Deadlines, repetition, busy servers, restarts and moved addresses, over every transport."""

from __future__ import annotations

import math
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from persia import env
from persia._rpc import client as client_module
from persia._rpc import zmq_socket
from persia._rpc.client import Client
from persia.errors import (
    ConfigError,
    DataTypeError,
    InternalError,
    NotConfigured,
    ServiceBusy,
    ServiceTimeout,
    ServiceUnavailable,
    WrongReplica,
)
from tests.rpc.conftest import WAITING
from tests.rpc.support import ToyService, Wire, busy, place
from tests.support.fixtures import Monkey
from tests.support.streams import Background
from tests.support.waiting import PATIENCE_S, until


def pause_no_more(client: Client, monkeypatch: Monkey) -> list[float]:
    """Try again at once until the next pause would be too long; returns the pauses to come."""
    pauses: list[float] = []
    monkeypatch.setattr(client_module, "_LONGEST_PAUSE_S", math.inf)
    monkeypatch.setattr(client._closed, "wait", pauses.append)
    return pauses


def test_nobody_there_is_unavailable_and_named(wire: Wire) -> None:
    address = wire.address().replace(":0", ":1")  # port 1 is free
    client = wire.client(address, timeout_s=0.05, replica=3)
    with pytest.raises(ServiceUnavailable, match=r"toy 3 at .*no connection") as caught:
        client.call("add", 1)
    assert place(caught.value) == ("toy", 3, address, "add")


@WAITING
def test_no_answer_is_a_timeout_and_named(wire: Wire) -> None:
    server, service, client = wire.toy()
    with pytest.raises(ServiceTimeout, match=r"no answer to hold within 0.4 s") as caught:
        client.call("hold", 1, timeout_s=0.4)
    assert place(caught.value) == ("toy", 0, server.address, "hold")
    service.permits.release()
    assert client.call("add", 1) == 1


def test_busy_is_tried_again(wire: Wire) -> None:
    with busy(wire, num_threads=1, calls=1) as (_, service, client):
        added = Background(lambda: client.call("add_once", 5))
        while client.stats().get("busy", 0) < 2:
            client.hello()
        service.permits.release()
        assert added.result() == 5


def test_busy_until_the_deadline_is_raised(wire: Wire, monkeypatch: Monkey) -> None:
    with busy(wire, num_threads=1, calls_per_peer=1) as (_, _, client):
        pauses = pause_no_more(client, monkeypatch)
        with pytest.raises(ServiceBusy, match="1 calls of this peer") as caught:
            client.call("add", 1)
        assert len(pauses) > 5
        assert (caught.value.role, caught.value.method) == ("toy", "add")


def test_arguments_are_checked_before_anything_is_sent(wire: Wire) -> None:
    _, _, client = wire.toy()
    with pytest.raises(DataTypeError, match=r"add\.number: expected int, got str"):
        client.call("add", "1")
    with pytest.raises(InternalError, match="expected 1 arguments, got 0"):
        client.call("add")
    with pytest.raises(InternalError, match="no method 'subtract'"):
        client.call("subtract", 1)


def test_a_closed_client_says_so(wire: Wire) -> None:
    _, service, client = wire.toy()
    held = Background(lambda: client.call("hold", 1))
    service.await_held()
    client.close()
    with pytest.raises(ServiceUnavailable, match="the client was closed") as caught:
        held.result()
    assert (caught.value.role, caught.value.method) == ("toy", "hold")
    with pytest.raises(ServiceUnavailable, match="the client was closed"):
        client.call("add", 1)
    client.close()


# --- calls made while serving a call ----------------------------------------------------


class Between(ToyService):
    """Asks another server for what it is asked, and waits for it as long as it may."""

    def __init__(self, behind: Client) -> None:
        super().__init__()
        self.behind = behind
        self.gave_up = threading.Event()

    def add(self, number: int) -> int:
        try:
            return int(self.behind.call("hold", number))
        except ServiceTimeout:
            self.gave_up.set()
            raise


@WAITING
def test_a_servers_own_calls_end_with_the_deadline_of_its_caller(wire: Wire) -> None:
    _, service, onward = wire.toy()
    between = Between(onward)
    client = wire.client(wire.serve(between))
    client.hello()

    def has_given_up() -> bool:
        with pytest.raises(ServiceTimeout):
            client.call("add", 1, timeout_s=0.4)
        return between.gave_up.wait(0.4)  # a busy machine may take so long to begin

    until(has_given_up, PATIENCE_S / 2)
    # The next call of the same thread has a deadline of its own.
    service.permits.release(2)
    assert client.call("add", 2) == 2


# --- servers that stop and come back ----------------------------------------------------


def test_a_server_that_comes_back_is_called_again(wire: Wire, monkeypatch: Monkey) -> None:
    # A server that is closed does not wait for a call that is held.
    monkeypatch.setattr(zmq_socket, "_SERVE_S", 0.05)

    class Silent(ToyService):
        def add(self, number: int) -> int:
            return self.hold(number) if number == 5 else super().add(number)

    restarts: list[Any] = []
    silent = Silent()
    server = wire.serve(silent)
    client: Client = wire.client(
        server, on_restart=lambda: restarts.append(client.call("add", 100))
    )
    assert client.call("add", 1) == 1
    first = client.incarnation
    held = Background(lambda: client.call("hold", 1))
    added = Background(lambda: client.call("add", 5))
    silent.await_held(2)
    assert server.stop(timeout_s=0.0)["unfinished"] == 2
    # It may have been executed, so it is not called again.
    with pytest.raises(ServiceUnavailable, match="may or may not have been"):
        held.result()
    _, again = wire.serve_toy(server.address)
    # The hook is called before the call that found out goes on.
    assert added.result() == 5
    assert restarts == [105]
    assert again.calls == [("add", 5), ("add", 100)]
    assert client.incarnation not in (None, first)
    assert client.stats()["lost"] >= 1
    assert client.stats()["sent_again"] >= 1
    silent.permits.release(2)


def test_not_configured_after_a_restart_is_tried_once_more(wire: Wire) -> None:
    class Needy(ToyService):
        is_configured = False

        def add(self, number: int) -> int:
            if not self.is_configured:
                raise NotConfigured("not yet")
            return super().add(number)

        def add_once(self, number: int) -> int:
            self.is_configured = True
            return 0

    server = wire.serve(Needy())
    client: Client = wire.client(server, on_restart=lambda: client.call("add_once", 0))
    with pytest.raises(NotConfigured):  # the first server ever is not restarted
        client.call("add", 1)
    server.stop()
    wire.serve(Needy(), server.address)
    with ThreadPoolExecutor(4) as pool:
        totals = list(pool.map(lambda n: client.call("add", n), [1] * 4))
    assert sorted(totals) == [1, 2, 3, 4]


def test_the_deadline_of_the_environment(ipc_wire: Wire, monkeypatch: Monkey) -> None:
    monkeypatch.delenv("PERSIA_RPC_TIMEOUT", raising=False)
    assert env.rpc_timeout_s() == 300.0
    monkeypatch.setenv("PERSIA_RPC_TIMEOUT", "0.02")
    assert env.rpc_timeout_s() == 0.02
    client = ipc_wire.client(ipc_wire.address(), timeout_s=None)
    with pytest.raises(ServiceUnavailable, match=r"within 0\.02 s"):
        client.call("add", 1)
    for text in ("0", "-1", "nan", "inf", "soon"):
        monkeypatch.setenv("PERSIA_RPC_TIMEOUT", text)
        with pytest.raises(ConfigError, match="PERSIA_RPC_TIMEOUT must be a positive number"):
            env.rpc_timeout_s()


def test_another_replica_at_the_address_does_nothing(wire: Wire, monkeypatch: Monkey) -> None:
    """Neither what was asked, nor what is done for a restarted server."""
    restarts: list[int] = []
    services = [ToyService(), ToyService(), ToyService()]
    first = wire.serve(services[0], replica_size=2)
    client = wire.client(first, on_restart=lambda: restarts.append(1))
    assert client.hello().replica_index == 0
    assert client.call("add", 1) == 1
    known = client.incarnation
    first.stop()
    other = wire.serve(services[1], first.address, replica_index=1, replica_size=2)
    with monkeypatch.context() as patch:
        pause_no_more(client, patch)
        with pytest.raises(WrongReplica, match="for replica 0, at its address is toy 1 now"):
            client.call("add", 2)
    with pytest.raises(ConfigError, match="expected toy 0, found 1 of 2"):
        client.hello()
    assert (services[1].calls, restarts, client.incarnation) == ([], [], known)
    assert other.stats()["bad.replica"] >= 1
    # A call that waits goes on where the right one is found.
    waiting = Background(lambda: client.call("add", 3))
    client.move(wire.serve(services[2], replica_size=2).address)
    assert waiting.result() == 3
    assert (services[1].calls, services[2].calls) == ([], [("add", 3)])
    assert restarts == [1]


def test_who_is_there_is_known_while_a_new_process_is_dealt_with(wire: Wire) -> None:
    """It may be gone again meanwhile: a search for it elsewhere must not wait for that."""
    begun, moved = threading.Event(), threading.Event()

    def configure() -> None:
        begun.set()
        client.call("add", 7)  # as long as a call may take

    services = [ToyService(), ToyService(), ToyService()]
    first = wire.serve(services[0])
    client: Client = wire.client(first, on_restart=configure)
    with ThreadPoolExecutor(2) as pool:
        assert client.call("add", 1) == 1
        first.stop()
        second = wire.serve(services[1], first.address)
        assert client.probe(PATIENCE_S).incarnation == second.hello.incarnation
        assert not begun.is_set()  # it is the next call's to deal with it
        holds: Any = lambda number: moved.wait(PATIENCE_S) and number  # noqa: E731
        services[1].add = holds  # type: ignore[method-assign]
        calling = pool.submit(client.call, "fill", 1)
        assert begun.wait(PATIENCE_S)
        found = pool.submit(client.probe, PATIENCE_S / 2).result(PATIENCE_S / 2)
        assert found.incarnation == second.hello.incarnation
        third = wire.serve(services[2])
        client.move(third.address)
        moved.set()
        calling.result(PATIENCE_S)
        assert ("add", 7) in services[2].calls
        assert client.incarnation == third.hello.incarnation


def test_without_a_replica_any_is_called(wire: Wire, monkeypatch: Monkey) -> None:
    server = wire.serve(ToyService(), replica_index=3, replica_size=4)
    assert wire.client(server, replica=None).call("add", 1) == 1
    # A refusal is reported at once, whatever the deadline.
    monkeypatch.setattr(client_module, "_FIRST_PAUSE_S", math.inf)
    with pytest.raises(ServiceBusy, match="for replica 2"):
        wire.client(server, replica=2).call("add", 1)


def test_a_result_is_awaited_as_long_as_the_server_is_alive(
    wire: Wire, monkeypatch: Monkey
) -> None:
    server, service, client = wire.toy()
    hello = client.hello
    # However busy this machine is.
    monkeypatch.setattr(client, "hello", lambda timeout_s: hello(PATIENCE_S))
    call = client.begin("hold", 7, timeout_s=PATIENCE_S)
    held = Background(lambda: call.result_while_alive(0.05))
    service.await_held()
    until(lambda: client.stats()["calls"] >= 5)  # hello, the call, and hello again
    service.permits.release()
    assert held.result() == 7
    monkeypatch.undo()
    server.stop(0.0)
    until(lambda: client.stats().get("lost"))
    lost = client.begin("add", 1, timeout_s=PATIENCE_S)
    with pytest.raises(ServiceUnavailable) as caught:
        lost.result_while_alive(0.01)
    lost.cancel()
    assert place(caught.value)[:3] == ("toy", 0, client.address)


def test_of_a_busy_server_it_is_not_awaited(wire: Wire) -> None:
    with busy(wire, num_threads=1, calls=1) as (_, _, client), pytest.raises(ServiceBusy):
        client.begin("add", 1, timeout_s=PATIENCE_S).result_while_alive(PATIENCE_S)
