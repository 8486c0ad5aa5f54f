"""Deadlines, repetition, busy servers, restarts and shutdown, over every transport."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from persia import env
from persia._rpc import zmq_socket
from persia._rpc.client import Client
from persia._rpc.memory_transport import MemoryTransport
from persia._rpc.messages import TableSigns
from persia._rpc.server import Server, ServerSettings, serve
from persia._rpc.transport import Outgoing, Parts
from persia.errors import (
    ConfigError,
    DataTypeError,
    InternalError,
    NotConfigured,
    RemoteError,
    ServiceBusy,
    ServiceError,
    ServiceTimeout,
    ServiceUnavailable,
)
from tests.rpc.conftest import WAITING
from tests.rpc.support import PATIENCE_S, TOY, ToyService, Wire, same
from tests.rpc.toys import make_client, toy_server


def test_many_calls_in_flight_on_one_channel(wire: Wire) -> None:
    with (
        toy_server(wire, num_threads=8) as (server, service),
        make_client(wire, server) as client,
    ):
        with ThreadPoolExecutor(8) as pool:
            held = [pool.submit(client.call, "hold", number) for number in range(8)]
            service.await_held(len(held))
            service.permits.release(len(held))
            assert [one.result() for one in held] == list(range(8))
        with ThreadPoolExecutor(8) as pool:
            echoed = list(pool.map(lambda n: (n, client.call("fill", n)), range(200)))
        for number, table in echoed:
            assert same(table, TableSigns(0, np.arange(number, dtype=np.uint64)))


def test_nobody_there_is_unavailable_and_named(wire: Wire) -> None:
    address = wire.address().replace(":0", ":1")  # nobody listens on port 1
    with (
        make_client(wire, address, timeout_s=0.05, replica=3) as client,
        pytest.raises(ServiceUnavailable, match=r"toy 3 at .*no connection") as caught,
    ):
        client.call("add", 1)
    error = caught.value
    assert (error.role, error.replica, error.method) == ("toy", 3, "add")
    assert error.address == address


def test_start_in_any_order(wire: Wire) -> None:
    if wire.kind == "tcp":
        with toy_server(wire) as (server, _):
            address = server.address  # free again
    else:
        address = wire.address()
    with make_client(wire, address) as client, ThreadPoolExecutor(1) as pool:
        # May not be repeated, but has not been sent either.
        waiting = pool.submit(client.call, "add_once", 5)
        with toy_server(wire, address):
            assert waiting.result(PATIENCE_S) == 5


@WAITING
def test_no_answer_is_a_timeout_and_named(wire: Wire) -> None:
    with toy_server(wire) as (server, service), make_client(wire, server) as client:
        client.hello()
        with pytest.raises(ServiceTimeout, match=r"no answer to hold within 0.4 s") as caught:
            client.call("hold", 1, timeout_s=0.4)
        error = caught.value
        assert (error.role, error.replica, error.method) == ("toy", 0, "hold")
        assert error.address == server.address
        service.permits.release()
        assert client.call("add", 1) == 1


@WAITING
def test_a_call_whose_caller_is_gone_is_not_begun(wire: Wire) -> None:
    with (
        toy_server(wire, num_threads=1) as (server, service),
        make_client(wire, server) as client,
    ):
        with ThreadPoolExecutor(1) as pool:
            held = pool.submit(client.call, "hold", 1)
            service.await_held()
            with pytest.raises(ServiceTimeout):
                client.call("add_once", 1, timeout_s=0.4)
            service.permits.release()
            assert held.result(PATIENCE_S) == 1
        assert client.call("add", 10) == 10
        assert server.stats()["expired"] == 1


def test_a_repetition_of_what_is_here_is_not_begun(wire: Wire) -> None:
    """Attempts are short here, so that the waiting call is sent several times."""
    with (
        toy_server(wire, num_threads=1) as (server, service),
        make_client(wire, server, attempt_s=0.01) as client,
        ThreadPoolExecutor(2) as pool,
    ):
        held = pool.submit(client.call, "hold", 1)
        service.await_held()
        added = pool.submit(client.call, "add", 5)
        while server.stats().get("repeated", 0) < 3:
            client.hello()
        service.permits.release()
        assert (held.result(PATIENCE_S), added.result(PATIENCE_S)) == (1, 5)
        assert service.calls == [("hold", 1), ("add", 5)]


def test_busy_is_tried_again(wire: Wire) -> None:
    with (
        toy_server(wire, num_threads=1, calls=1) as (server, service),
        make_client(wire, server) as client,
        ThreadPoolExecutor(2) as pool,
    ):
        held = pool.submit(client.call, "hold", 1)
        service.await_held()
        added = pool.submit(client.call, "add_once", 5)
        while client.stats().get("busy", 0) < 2:
            client.hello()
        service.permits.release()
        assert (held.result(PATIENCE_S), added.result(PATIENCE_S)) == (1, 5)


@WAITING
def test_busy_until_the_deadline_is_raised(wire: Wire) -> None:
    with (
        toy_server(wire, num_threads=1, calls_per_peer=1) as (server, service),
        make_client(wire, server) as client,
        ThreadPoolExecutor(1) as pool,
    ):
        held = pool.submit(client.call, "hold", 1)
        service.await_held()
        with pytest.raises(ServiceBusy, match="1 calls of this peer") as caught:
            client.call("add", 1, timeout_s=0.4)
        assert (caught.value.role, caught.value.method) == ("toy", "add")
        service.permits.release()
        assert held.result(PATIENCE_S) == 1


@WAITING
def test_bytes_that_wait_are_bounded_but_one_call_is_always_taken(wire: Wire) -> None:
    big = [TableSigns(0, np.zeros(1000, np.uint64))]
    with (
        toy_server(wire, num_threads=1, bytes=5000) as (server, service),
        make_client(wire, server) as client,
        ThreadPoolExecutor(1) as pool,
    ):
        assert len(client.call("echo", big)) == 1
        held = pool.submit(client.call, "hold", 1)
        service.await_held()
        with pytest.raises(ServiceBusy, match="bytes of calls"):
            client.call("echo", big, timeout_s=0.4)
        service.permits.release()
        assert held.result(PATIENCE_S) == 1


def test_a_failing_method_harms_nobody(wire: Wire) -> None:
    with toy_server(wire, num_threads=1) as (server, _), make_client(wire, server) as client:
        with pytest.raises(RemoteError, match="ZeroDivisionError: why") as caught:
            client.call("fail", "ZeroDivisionError")
        assert "support.py" in str(caught.value.__cause__)
        with pytest.raises(DataTypeError, match="wrong's result: expected int, got str"):
            client.call("wrong")
        assert client.call("add", 2) == 2
        assert server.stats()["errors"] == 2


def test_arguments_are_checked_before_anything_is_sent(wire: Wire) -> None:
    with toy_server(wire) as (server, _), make_client(wire, server) as client:
        with pytest.raises(DataTypeError, match=r"add\.number: expected int, got str"):
            client.call("add", "1")
        with pytest.raises(InternalError, match="expected 1 arguments, got 0"):
            client.call("add")
        with pytest.raises(InternalError, match="no method 'subtract'"):
            client.call("subtract", 1)


def test_a_closed_client_says_so(wire: Wire) -> None:
    with toy_server(wire) as (server, service), ThreadPoolExecutor(1) as pool:
        with make_client(wire, server) as client:
            held = pool.submit(client.call, "hold", 1)
            service.await_held()
        with pytest.raises(ServiceUnavailable, match="the client was closed") as caught:
            held.result(PATIENCE_S)
        assert (caught.value.role, caught.value.method) == ("toy", "hold")
        with pytest.raises(ServiceUnavailable, match="the client was closed"):
            client.call("add", 1)
        client.close()


# --- calls made on somebody's behalf -----------------------------------------------------


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
    with toy_server(wire) as (behind, service), make_client(wire, behind) as onward:
        onward.hello()
        between = Between(onward)
        server = serve(wire.transport, wire.address(), TOY, between)
        with make_client(wire, server) as client:
            with pytest.raises(ServiceTimeout):
                client.call("add", 1, timeout_s=0.4)
            assert between.gave_up.wait(PATIENCE_S / 2)
            # The next call of the same thread has a deadline of its own.
            service.permits.release(2)
            assert client.call("add", 2) == 2
        server.stop()


# --- servers that stop and come back ----------------------------------------------------


@pytest.fixture
def _short_goodbyes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who closes an end does not wait for a call that is held."""
    monkeypatch.setattr(zmq_socket, "_WORK_S", 0.05)


@pytest.mark.usefixtures("_short_goodbyes")
def test_a_server_that_comes_back_is_called_again(wire: Wire) -> None:
    restarts: list[Any] = []
    with toy_server(wire) as (server, service):
        address = server.address
        client = Client(
            wire.transport,
            address,
            TOY,
            timeout_s=PATIENCE_S,
            on_restart=lambda: restarts.append(client.call("add", 100)),
        )
        with contextlib.closing(client):
            assert client.call("add", 1) == 1
            first = client.incarnation
            with ThreadPoolExecutor(2) as pool:
                held = pool.submit(client.call, "hold", 1)
                service.await_held()
                assert server.stop(timeout_s=0.0)["unfinished"] == 1
                # It may have been executed, so it is not called again.
                with pytest.raises(ServiceUnavailable, match="whether it was executed"):
                    held.result(PATIENCE_S)
                added = pool.submit(client.call, "add", 5)
                with toy_server(wire, address) as (_, again):
                    # The hook is called before the call that found out goes on.
                    assert added.result(PATIENCE_S) == 5
                    assert restarts == [105]
                    assert again.calls == [("add", 5), ("add", 100)]
                    assert client.incarnation not in (None, first)
                    assert client.stats()["lost"] >= 1


@pytest.mark.usefixtures("_short_goodbyes")
def test_a_repeatable_call_survives_its_server(wire: Wire) -> None:
    class Silent(ToyService):
        def add(self, number: int) -> int:
            return self.hold(number)

    silent = Silent()
    server = serve(wire.transport, wire.address(), TOY, silent)
    with make_client(wire, server) as client, ThreadPoolExecutor(1) as pool:
        added = pool.submit(client.call, "add", 5)
        silent.await_held()
        server.stop(timeout_s=0.0)
        with toy_server(wire, server.address):
            assert added.result(PATIENCE_S) == 5
        assert client.stats()["sent_again"] >= 1
    silent.permits.release()


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

    service = Needy()
    server = serve(wire.transport, wire.address(), TOY, service)
    client = Client(
        wire.transport,
        server.address,
        TOY,
        timeout_s=PATIENCE_S,
        on_restart=lambda: client.call("add_once", 0),
    )
    with contextlib.closing(client):
        with pytest.raises(NotConfigured):  # the first server ever is not restarted
            client.call("add", 1)
        server.stop()
        server = serve(wire.transport, server.address, TOY, Needy())
        with ThreadPoolExecutor(4) as pool:
            totals = list(pool.map(lambda n: client.call("add", n), [1] * 4))
        assert sorted(totals) == [1, 2, 3, 4]
    server.stop()


def add_until(is_over: threading.Event, client: Client) -> None:
    while not is_over.is_set():
        # One that came before the server began to stop waits behind those that hold it.
        with contextlib.suppress(ServiceError):
            client.call("add", 1, timeout_s=0.1)


def test_stop_finishes_what_is_here_and_refuses_the_rest(wire: Wire) -> None:
    with (
        toy_server(wire, num_threads=2) as (server, service),
        make_client(wire, server) as client,
    ):
        with ThreadPoolExecutor(4) as pool:
            held = [pool.submit(client.call, "hold", n) for n in range(2)]
            service.await_held(len(held))
            stopped = pool.submit(server.stop)
            is_over = threading.Event()
            adding = pool.submit(add_until, is_over, client)
            while not client.stats().get("busy", 0):
                client.hello()
            service.permits.release(2)
            assert [one.result(PATIENCE_S) for one in held] == [0, 1]
            counts = stopped.result(PATIENCE_S)
            is_over.set()
            adding.result(PATIENCE_S)
        assert "unfinished" not in counts
        assert counts["replies"] >= 2
        assert counts["busy"] >= 1


def test_addresses_in_use_are_refused(wire: Wire) -> None:
    with toy_server(wire) as (server, _):
        with pytest.raises(ConfigError, match=r"in use|another process does"):
            Server(wire.transport, server.address, TOY, ToyService())
        with make_client(wire, server) as client:
            assert client.call("add", 1) == 1


@pytest.mark.parametrize(
    "address",
    ["", "nowhere", "udp://a:1", "tcp://a", "tcp://:1", "a:b", "a:65536", "ipc://" + "x" * 108],
)
def test_addresses_that_cannot_be_read(zmq_wire: Wire, address: str) -> None:
    with pytest.raises(ConfigError, match=r"expected"):
        zmq_wire.transport.connect(address)
    with pytest.raises(ConfigError, match=r"expected"):
        zmq_wire.transport.listen(address)


def test_an_address_that_is_not_here(zmq_wire: Wire) -> None:
    with pytest.raises(ConfigError, match=r"cannot listen at tcp://192\.0\.2\.1:0"):
        zmq_wire.transport.listen("192.0.2.1:0")
    with pytest.raises(ConfigError, match="cannot listen at ipc:///nowhere"):
        zmq_wire.transport.listen("ipc:///nowhere/at/all")


def test_an_address_that_is_taken(tcp_wire: Wire) -> None:
    listener = tcp_wire.transport.listen("127.0.0.1:0")
    with pytest.raises(ConfigError, match="another job or process listens there") as caught:
        tcp_wire.transport.listen(listener.address)
    assert "PERSIA_EMBEDDING_WORKERS" in str(caught.value)


# --- messages that get lost -------------------------------------------------------------


class LossyChannel:
    """Drops or doubles messages of a memory channel, as told by their number."""

    def __init__(self, inner: Any, fate: Callable[[int], int]) -> None:
        self.inner = inner
        self.fate = fate
        self.num_sent = 0
        self.num_received = 0

    @property
    def address(self) -> str:
        return str(self.inner.address)

    def start(self, on_message: Callable[[Parts], None], on_lost: Callable[[], None]) -> None:
        def receive(parts: Parts) -> None:
            self.num_received += 1
            for _ in range(self.fate(-self.num_received)):
                on_message(parts)

        self.inner.start(receive, on_lost)

    def send(self, outgoing: Outgoing) -> None:
        self.num_sent += 1
        copies = self.fate(self.num_sent)
        if not copies:
            outgoing.claim()  # it has left, and never arrives
        for number in range(copies):
            self.inner.send(outgoing if number == 0 else Outgoing(outgoing.parts))

    def close(self) -> None:
        self.inner.close()


class LossyTransport(MemoryTransport):
    """``fate`` says how often message n arrives; answers have negative numbers."""

    def __init__(self, fate: Callable[[int], int]) -> None:
        super().__init__()
        self.fate = fate

    def connect(self, address: str) -> Any:
        return LossyChannel(super().connect(address), self.fate)


@pytest.mark.parametrize("lost", [1, -1])
def test_lost_messages_are_sent_again(lost: int) -> None:
    transport = LossyTransport(lambda number: 0 if number == lost else 1)
    service = ToyService()
    server = serve(transport, "a", TOY, service)
    client = Client(transport, "a", TOY, timeout_s=PATIENCE_S, attempt_s=0.01)
    assert client.call("fill", 3).signs.tolist() == [0, 1, 2]
    assert client.stats()["sent_again"] >= 1
    client.close()
    server.stop()


def test_what_may_not_be_repeated_is_sent_once() -> None:
    transport = LossyTransport(lambda number: 0 if number == 1 else 1)
    service = ToyService()
    server = serve(transport, "a", TOY, service)
    client = Client(transport, "a", TOY, timeout_s=0.1, attempt_s=0.01)
    with pytest.raises(ServiceTimeout):
        client.call("add_once", 1)
    assert client.call("add", 1) == 1
    assert service.calls == [("add", 1)]
    client.close()
    server.stop()


def test_doubled_answers_harm_nobody() -> None:
    transport = LossyTransport(lambda number: 2 if number < 0 else 1)
    server = serve(transport, "a", TOY, ToyService())
    client = Client(transport, "a", TOY, timeout_s=PATIENCE_S)
    assert [client.call("add", 1) for _ in range(3)] == [1, 2, 3]
    client.close()
    server.stop()


# --- the environment --------------------------------------------------------------------


def test_the_default_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PERSIA_RPC_TIMEOUT", raising=False)
    assert env.rpc_timeout_s() == 300.0
    monkeypatch.setenv("PERSIA_RPC_TIMEOUT", "0.02")
    assert env.rpc_timeout_s() == 0.02
    client = Client(MemoryTransport(), "nobody", TOY)
    with pytest.raises(ServiceUnavailable, match=r"within 0\.02 s"):
        client.call("add", 1)
    client.close()


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "soon"])
def test_bad_deadlines_are_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("PERSIA_RPC_TIMEOUT", text)
    with pytest.raises(ConfigError, match="PERSIA_RPC_TIMEOUT must be a positive number"):
        env.rpc_timeout_s()


def test_a_server_needs_no_client_to_stop(wire: Wire) -> None:
    before = threading.active_count()
    server = Server(wire.transport, wire.address(), TOY, ToyService())
    server.stop()  # never started
    server = serve(
        wire.transport,
        wire.address(),
        TOY,
        ToyService(),
        settings=ServerSettings(num_threads=2),
    )
    server.stop()
    server.stop()
    assert threading.active_count() == before
