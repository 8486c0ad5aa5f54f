"""Hostile peers, floods and overload, bounded queues, and stopping.

In each case the server goes on, another client is served meanwhile, and the fault is counted.
"""

from __future__ import annotations

import contextlib
import math
import socket as sockets
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq

from persia._rpc import client as client_module
from persia._rpc.client import Client
from persia._rpc.codec import ErrorOrigin, error_from_body
from persia._rpc.frame import PROTOCOL, Call, Failure, Limits, Part, Reply, decode, encode
from persia._rpc.messages import TableSigns
from persia._rpc.server import Server
from persia.errors import (
    DataTypeError,
    ProtocolError,
    RemoteError,
    ServiceBusy,
    ServiceError,
    ServiceTimeout,
    ServiceUnavailable,
)
from tests.rpc.conftest import WAITING
from tests.rpc.support import BAD, Wire, busy, header, place, tcp_of
from tests.support.fixtures import Monkey
from tests.support.waiting import PATIENCE_S, until

ASKED = ErrorOrigin("toy", 0, "here", "add")


@pytest.mark.parametrize(("parts", "reason"), [b[1:] for b in BAD], ids=[b[0] for b in BAD])
def test_bad_messages_are_answered_and_counted(
    ipc_wire: Wire, parts: list[bytes], reason: str
) -> None:
    server, _ = ipc_wire.serve_toy()
    peer = ipc_wire.peer(server)
    peer.send(parts)
    answer = peer.receive()
    assert isinstance(answer, Failure)
    assert type(error_from_body(answer.body, ASKED)) is ProtocolError
    assert server.stats()[f"bad.{reason}"] == 1
    # The same connection still serves.
    peer.call(3, "add", 5)
    good = peer.answer(3)
    assert isinstance(good, Reply)
    assert good.body == 5


def test_a_peer_of_another_version_can_read_the_answer(ipc_wire: Wire) -> None:
    """It is in the version of the peer, and says which one the server has."""
    server, _ = ipc_wire.serve_toy()
    peer = ipc_wire.peer(server)
    peer.send([b"PERSIA/1", header()])
    first, *rest = peer.socket.recv_multipart()
    assert first == b"PERSIA/1"
    answer = decode([PROTOCOL, *rest])
    assert isinstance(answer, Failure)
    error = error_from_body(answer.body, ASKED)
    assert type(error) is ProtocolError
    assert "protocol b'PERSIA/2', as both ends are of one version of PERSIA" in str(error)
    assert server.stats()["bad.version"] == 1


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (Call(1, "subtract", 1000, [1]), "toy has no method 'subtract'"),
        (Call(1, "__class__", 1000, []), "has no method"),
        (Call(1, "add", 1000, 1), "expected a list of 1 arguments"),
        (Call(1, "add", 1000, [1, 2]), "expected a list of 1 arguments"),
        (Call(1, "add", 1000, ["1"]), "expected int, got '1'"),
        (Call(1, "add", 1000, [1], (np.zeros(1),)), "arrays by its fields, got 1"),
        (Call(1, "echo", 1000, [[[0, 0]]], (np.zeros(1),)), "expected uint64"),
        (Reply(1, 1, 5), "expected a call"),
    ],
)
def test_calls_that_do_not_fit_are_answered(tcp_wire: Wire, call: Any, text: str) -> None:
    server, service = tcp_wire.serve_toy()
    peer = tcp_wire.peer(server)
    peer.send(encode(call))
    answer = peer.answer(1)
    assert isinstance(answer, Failure)
    error = error_from_body(answer.body, ASKED)
    assert type(error) is ProtocolError
    assert text in str(error)
    assert service.calls == []


# --- connections that are no ZeroMQ -------------------------------------------------------


@pytest.mark.parametrize(
    "content",
    [
        b"",  # half open: connects, says nothing
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f",  # a handshake begun and left there
        b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff" * 100,
        bytes(100),
    ],
)
def test_connections_that_are_none_disturb_nobody(tcp_wire: Wire, content: bytes) -> None:
    server, _, client = tcp_wire.toy()
    strangers = [tcp_of(server) for _ in range(8)]
    for stranger in strangers:
        stranger.sendall(content)
    assert client.call("add", 1) == 1
    for stranger in strangers:
        stranger.close()
    assert client.call("add", 1) == 2
    assert client.stats().get("lost", 0) == 0


def test_a_server_that_accepts_and_says_nothing(tcp_wire: Wire) -> None:
    """Half open from the other side: there is no connection until the handshake is done."""
    with sockets.create_server(("127.0.0.1", 0)) as mute:
        address = f"tcp://127.0.0.1:{mute.getsockname()[1]}"
        with pytest.raises(ServiceUnavailable, match="no connection within"):
            tcp_wire.client(address, timeout_s=0.1).call("add", 1)


@pytest.fixture
def router(tmp_path: Path) -> Iterator[zmq.Socket[bytes]]:
    """A server of another make."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as made:
        made.bind(f"ipc://{tmp_path}/router")
        yield made
        made.close(linger=0)


def test_a_server_that_answers_rubbish(ipc_wire: Wire, router: zmq.Socket[bytes]) -> None:
    """Rubbish with an id fails that call at once; without one it is counted."""
    address = router.getsockopt_string(zmq.LAST_ENDPOINT)

    def answer(*answers: list[Part]) -> None:
        peer, _, raw = router.recv_multipart()
        assert b"add" in raw
        for parts in answers:
            router.send_multipart([peer, *parts])

    reply = encode(Reply(1, 1, 0, (np.zeros(2),)))
    unspecified = header(k="reply", id=2, i=1, b=1, m=..., t=..., a=[["<u8", [1]]])
    refused = ["ProtocolError", "version 1 only", "", None, "", "", ""]
    older = [b"PERSIA/1", *encode(Failure(0, 1, refused))[1:]]
    strange: list[tuple[list[list[Part]], str]] = [
        ([[b"x"], [PROTOCOL, b"\xc1"], encode(Call(1, "add", 1, [1]))], "expected an answer"),
        ([[PROTOCOL, unspecified]], "of the header, got 0"),
        ([[*reply[:2], b"123"], encode(Reply(3, 1, "text"))], "add's result: expected int"),
        ([encode(Failure(0, 1, refused))], "version 1 only"),
        ([older], "as both ends are of one version of PERSIA, got b'PERSIA/1'"),
    ]
    client = ipc_wire.client(address)
    with ThreadPoolExecutor(1) as pool:
        for answers, text in strange:
            waiting = pool.submit(client.call, "add", 1)
            answer(*answers)
            with pytest.raises(ProtocolError, match=text) as caught:
                waiting.result(PATIENCE_S)
            assert (caught.value.role, caught.value.address) == ("toy", address)
        counts = client.stats().items()
        assert sum(count for name, count in counts if name.startswith("bad.")) == 6


# --- too much ---------------------------------------------------------------------------


def test_a_flood_leaves_others_their_turn(wire: Wire) -> None:
    """100 calls of one peer, a share of 64, one thread: the other's call is third in turn."""
    server, service = wire.serve_toy(num_threads=1, calls_per_peer=64)
    flood, other = wire.peer(server), wire.peer(server)
    for number in range(1, 101):
        flood.call(number, "hold", number)
    refused = []
    for _ in range(36):
        answer = flood.receive()
        assert isinstance(answer, Failure)
        assert type(error_from_body(answer.body, ASKED)) is ServiceBusy
        refused.append(answer.call_id)
    assert refused == list(range(65, 101))
    other.call(1, "add", 5)
    other.settle()
    service.permits.release(2)
    good = other.answer(1)
    assert isinstance(good, Reply)
    assert good.body == 5
    assert service.calls[:3] == [("hold", 1), ("hold", 2), ("add", 5)]
    assert len(service.calls) <= 4
    assert server.stats()["busy"] == 36


def test_who_sends_much_leaves_room_for_others(ipc_wire: Wire) -> None:
    """A connection has a share of the bytes as well: all of them would make others wait."""
    server, service = ipc_wire.serve_toy(bytes=40_000, bytes_per_peer=10_000, num_threads=1)
    flood, other = ipc_wire.peer(server), ipc_wire.peer(server)
    flood.call(1, "hold", 1)
    for number in range(2, 9):
        small = np.zeros(500, np.uint64)  # 4,000 bytes
        flood.send(encode(Call(number, "echo", 20_000, [[[0, 0]]], (small,))))
    for number in range(4, 9):
        answer = flood.answer(number)
        assert isinstance(answer, Failure)
        assert "bytes of this peer are queued" in answer.body[1]
    big = np.zeros(2_500, np.uint64)  # more than a share, but alone
    other.send(encode(Call(1, "echo", 20_000, [[[0, 0]]], (big,))))
    other.settle()
    assert server.stats()["busy"] == 5
    service.permits.release()
    assert isinstance(other.answer(1), Reply)
    assert isinstance(flood.answer(3), Reply)


def test_who_does_not_read_loses_answers_and_holds_up_nobody(ipc_wire: Wire) -> None:
    server, _, client = ipc_wire.toy()
    slow = ipc_wire.peer(server, RCVHWM=1, RCVBUF=4096)
    number = 0
    while not server.stats().get("dropped.peer_slow", 0):
        number += 1
        slow.call(number, "fill", 16384)  # 128 KiB each
        assert client.call("fill", 1).signs.tolist() == [0]
        assert number < 10_000
    assert client.stats().get("lost", 0) == 0


def test_parts_beyond_the_limit_cut_the_connection_off(ipc_wire: Wire, tmp_path: Path) -> None:
    """libzmq closes it before it holds the part; our client sees that and another is served."""
    large = [TableSigns(0, np.zeros(1 << 14, np.uint64))]
    with contextlib.closing(Wire("ipc", tmp_path, limits=Limits(array_bytes=1 << 16))) as wire:
        server, _, other = wire.toy()
        client = ipc_wire.client(server)
        assert (client.call("add", 1), other.call("add", 1)) == (1, 2)
        with pytest.raises((ServiceTimeout, ServiceUnavailable), match=r"no (answer|conn)"):
            client.call("echo", large, timeout_s=1.0)
        until(lambda: client.stats().get("lost"))
        assert other.call("add", 1) == 3
        assert other.stats().get("lost", 0) == 0
        # A client with the same limits refuses to send it.
        with pytest.raises(ProtocolError, match="65536 bytes in an array"):
            other.call("echo", large)


def test_too_many_parts_are_dropped_and_counted(tmp_path: Path) -> None:
    limits = Limits(num_arrays=4, message_bytes=4096)
    with contextlib.closing(Wire("ipc", tmp_path, limits=limits)) as wire:
        server, _ = wire.serve_toy()
        peer = wire.peer(server)
        for parts, reason in (
            ([PROTOCOL, *[b""] * 1000], "num_arrays"),
            ([PROTOCOL, header(), bytes(5000)], "message_bytes"),
        ):
            peer.send(parts)
            peer.settle()
            assert server.stats()[f"dropped.{reason}"] == 1


def test_a_result_too_large_is_an_error_for_its_caller(tmp_path: Path) -> None:
    with contextlib.closing(Wire("ipc", tmp_path, limits=Limits(array_bytes=1 << 16))) as wire:
        _, _, client = wire.toy()
        with pytest.raises(ProtocolError, match="65536 bytes in an array, this one has 80000"):
            client.call("fill", 10_000)
        assert len(client.call("fill", 8192).signs) == 8192


# --- bounds and stopping ----------------------------------------------------------------


@WAITING
def test_a_call_whose_caller_is_gone_is_not_begun(wire: Wire) -> None:
    with busy(wire, num_threads=1) as (server, _, client):
        with pytest.raises(ServiceTimeout):
            client.call("add_once", 1, timeout_s=0.4)
        # There its time begins when it comes.
        until(lambda: any(now_expired(server)))
    assert server.stats()["expired"] == 1


def now_expired(server: Server) -> Iterator[bool]:
    for calls in list(server._queues.values()):
        yield all(one.expires_at < time.monotonic() for one in calls)


def test_a_repetition_of_what_is_here_is_not_begun(wire: Wire) -> None:
    with busy(wire, num_threads=1) as (server, service, client):
        added = client.begin("add", 5)
        for _ in range(3):
            added._send()
        client.hello()  # which is behind them
        assert server.stats()["repeated"] == 3
        service.permits.release()
        assert added.result() == 5
        assert service.calls == [("hold", 1), ("add", 5)]


def test_bytes_that_wait_are_bounded_but_one_call_is_always_taken(
    wire: Wire, monkeypatch: Monkey
) -> None:
    big = [TableSigns(0, np.zeros(1000, np.uint64))]
    with busy(wire, num_threads=1, bytes=5000) as (_, service, client):
        # A refusal is reported at once, whatever the deadline.
        with monkeypatch.context() as patch:
            patch.setattr(client_module, "_FIRST_PAUSE_S", math.inf)
            with pytest.raises(ServiceBusy, match="bytes of calls"):
                client.call("echo", big)
        service.permits.release()
        assert len(client.call("echo", big)) == 1


def test_a_failing_method_harms_nobody(wire: Wire) -> None:
    server, _, client = wire.toy(num_threads=1)
    with pytest.raises(RemoteError, match="ZeroDivisionError: why") as caught:
        client.call("fail", "ZeroDivisionError")
    assert "support.py" in str(caught.value.__cause__)
    assert place(caught.value) == ("toy", 0, server.address, "fail")
    with pytest.raises(DataTypeError, match="wrong's result: expected int, got str"):
        client.call("wrong")
    assert client.call("add", 2) == 2
    counts = server.stats()
    assert (counts["calls"], counts["replies"], counts["errors"]) == (3, 1, 2)


def test_stop_finishes_what_is_here_and_refuses_the_rest(wire: Wire) -> None:
    server, service, client = wire.toy(num_threads=2)
    with ThreadPoolExecutor(4) as pool:
        held = [pool.submit(client.call, "hold", n) for n in range(2)]
        service.await_held(len(held))
        stopped = pool.submit(server.stop, PATIENCE_S)
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


def add_until(is_over: threading.Event, client: Client) -> None:
    while not is_over.is_set():
        # One that came before the server began to stop waits behind those that hold it.
        with contextlib.suppress(ServiceError):
            client.call("add", 1, timeout_s=0.1)
