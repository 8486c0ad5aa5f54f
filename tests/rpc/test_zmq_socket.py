"""Threads of a ZeroMQ end when it is closed or fails, and the memory that it holds."""

from __future__ import annotations

import queue
import threading
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import pytest

from persia._rpc.transport import Outgoing, Parts
from persia._rpc.zmq_transport import ZmqTransport
from persia.errors import InternalError, ServiceUnavailable
from tests.rpc.support import Wire, watched
from tests.support.fixtures import Monkey
from tests.support.waiting import PATIENCE_S


@pytest.fixture
def transport(ipc_wire: Wire) -> ZmqTransport:
    return ipc_wire.transport


@pytest.fixture
def address(ipc_wire: Wire) -> str:
    return ipc_wire.address()


def test_an_end_that_is_closed_while_its_connection_breaks_has_no_endless_thread(
    transport: ZmqTransport, address: str
) -> None:
    """Its thread looks for what came before the break, and there is nothing to find."""
    channel = transport.connect(address)
    is_cut, came_here, may_go_on = (threading.Event() for _ in range(3))
    step, on_event = channel._step, channel._check_monitor

    def cut() -> None:
        if threading.current_thread() is channel._thread:  # ``start`` looks as well
            # As if libzmq had reported the break, and retried.
            channel._is_cut = channel._is_retrying = True
            is_cut.set()
        on_event()

    def step_of_a_cut_end() -> bool:
        if is_cut.is_set():
            came_here.set()
            assert may_go_on.wait(PATIENCE_S)
        return step()

    channel._check_monitor = cut  # type: ignore[method-assign]
    channel._step = step_of_a_cut_end  # type: ignore[method-assign]
    channel.start(lambda parts: None, lambda: None)
    assert came_here.wait(PATIENCE_S)
    closing = threading.Thread(target=channel.close, daemon=True)
    closing.start()
    while not channel._is_closing:
        closing.join(0.001)
    may_go_on.set()
    closing.join(PATIENCE_S)
    assert not closing.is_alive()


def test_w48_an_end_that_is_closed_while_its_thread_looks_ends(
    transport: ZmqTransport, address: str
) -> None:
    """Nothing wakes it: it was not waiting when the end was closed."""
    listener = transport.listen(address)
    looking, closed = threading.Event(), threading.Event()
    look = listener._step

    def look_late() -> bool:
        looking.set()
        assert closed.wait(PATIENCE_S)
        return look()

    listener._step = look_late  # type: ignore[method-assign]
    listener.start(lambda peer, parts: None, lambda reason: None)
    assert looking.wait(PATIENCE_S)
    # What ``close`` does before it waits for the thread.
    with listener._lock:
        listener._is_closing = True
        listener._wake()
    closed.set()
    assert listener._thread is not None
    listener._thread.join(PATIENCE_S)
    assert not listener._thread.is_alive()


def test_a_channel_whose_thread_fails_fails_the_calls_with_the_cause(
    ipc_wire: Wire, monkeypatch: Monkey
) -> None:
    error = ValueError("why")
    ended: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
    monkeypatch.setattr(threading, "excepthook", lambda args: ended.put(args.exc_value))
    server, service = ipc_wire.serve_toy(num_threads=1)
    channel = ipc_wire.transport.connect(server.address)
    is_to_break, step = threading.Event(), channel._step

    def look() -> bool:
        if is_to_break.is_set():
            raise error
        return step()

    monkeypatch.setattr(channel, "_step", look)
    monkeypatch.setattr(ipc_wire.transport, "connect", lambda address: channel)
    client = ipc_wire.client(server)
    client.hello()
    with ThreadPoolExecutor(2) as pool:
        once = pool.submit(client.call, "hold", 1)
        service.await_held()
        again = pool.submit(client.call, "add", 1)  # waits for the one thread
        is_to_break.set()
        with channel._lock:
            channel._wake_out.send(b"\0")
        with pytest.raises(InternalError, match=r"persia-channel .*why") as caught:
            again.result(PATIENCE_S / 2)
        assert caught.value.__cause__ is error
        with pytest.raises(ServiceUnavailable):
            once.result(PATIENCE_S / 2)
        with pytest.raises(InternalError, match=r"persia-channel .*why"):
            client.call("add", 1)
    assert ended.get(timeout=PATIENCE_S) is error


def test_a_listener_whose_thread_fails_says_so_where_a_process_looks(
    transport: ZmqTransport, address: str, monkeypatch: Monkey
) -> None:
    error = ValueError("why")
    ended: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
    monkeypatch.setattr(threading, "excepthook", lambda args: ended.put(args.exc_value))
    listener = transport.listen(address)
    monkeypatch.setattr(listener, "_step", Mock(side_effect=error))
    listener.start(lambda peer, parts: None, lambda reason: None)
    assert ended.get(timeout=PATIENCE_S) is error


def test_an_exception_of_a_signal_as_a_message_is_sent_does_not_close_the_end(
    transport: ZmqTransport, address: str
) -> None:
    class Interrupted(Outgoing):
        """A handler of the user's, such as one of SIGALRM, raises when it is to be sent."""

        def claim(self) -> bool:
            raise TimeoutError("of the user's")

    listener = transport.listen(address)
    came: queue.SimpleQueue[Parts] = queue.SimpleQueue()
    listener.start(lambda peer, parts: came.put(parts), lambda reason: None)
    channel = transport.connect(address)
    channel.start(lambda parts: None, lambda: None)
    with pytest.raises(TimeoutError):
        channel.send(Interrupted([b"1"]))
    channel.send(Outgoing([b"2"]))
    assert bytes(came.get(timeout=PATIENCE_S)[0]) == b"2"


def test_a_transport_that_is_closed_holds_no_array(
    transport: ZmqTransport, address: str
) -> None:
    """What had not left is released as the sockets close, when no thread sends any more."""
    listener = transport.listen(address)
    came_here, may_go_on = threading.Event(), threading.Event()

    def take(peer: bytes, parts: Parts) -> None:
        came_here.set()
        may_go_on.wait(PATIENCE_S)

    listener.start(take, lambda reason: None)
    channel = transport.connect(address)
    channel.start(lambda parts: None, lambda: None)
    gone = []
    for _ in range(20):
        array, is_gone = watched(1 << 21)
        gone.append(is_gone)
        channel.send(Outgoing([b"head", array.data]))
        del array
    assert came_here.wait(PATIENCE_S)
    channel.close()
    may_go_on.set()
    transport.close()
    assert all(event.is_set() for event in gone)
