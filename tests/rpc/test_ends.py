"""The ends of a ZeroMQ connection: their threads when they are closed or fail, their memory."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq

from persia._rpc import multipart
from persia._rpc.client import Client
from persia._rpc.server import ServerSettings, serve
from persia._rpc.transport import Outgoing, Parts
from persia._rpc.zmq_endpoints import ZmqChannel
from persia._rpc.zmq_transport import ZmqTransport
from persia.errors import InternalError, ServiceUnavailable
from tests.rpc.support import TOY, ToyService

WAIT_S = 20.0


def test_an_end_that_is_closed_while_its_connection_breaks_has_no_endless_thread(
    tmp_path: Path,
) -> None:
    """Its thread looks for what came before the break, and there is nothing to find."""
    transport = ZmqTransport()
    channel = transport.connect(f"ipc://{tmp_path}/nobody")
    is_cut, came_here, may_go_on = (threading.Event() for _ in range(3))
    step, on_event = channel._step, channel._on_event

    def cut() -> None:
        if threading.current_thread() is channel._thread:  # ``start`` looks as well
            # As if libzmq had told of the break, and tried to connect anew.
            channel._was_cut = channel._tries_anew = True
            is_cut.set()
        on_event()

    def step_of_a_cut_end() -> bool:
        if is_cut.is_set():
            came_here.set()
            assert may_go_on.wait(WAIT_S)
        return step()

    channel._on_event = cut  # type: ignore[method-assign]
    channel._step = step_of_a_cut_end  # type: ignore[method-assign]
    channel.start(lambda parts: None, lambda: None)
    assert came_here.wait(WAIT_S)
    closing = threading.Thread(target=channel.close, daemon=True)
    closing.start()
    while not channel._is_closing:
        closing.join(0.001)
    may_go_on.set()
    closing.join(WAIT_S)
    assert not closing.is_alive()
    transport.close()


class Broken(Exception):
    """What a test has the thread of an end fail with."""


@pytest.fixture
def failures(monkeypatch: pytest.MonkeyPatch) -> queue.SimpleQueue[BaseException | None]:
    """What ended a thread."""
    found: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
    monkeypatch.setattr(threading, "excepthook", lambda args: found.put(args.exc_value))
    return found


def break_thread(end: Any) -> Callable[[], None]:
    """Returns what makes the thread of an end, once it has started, fail at its next look."""
    is_to_break, step = threading.Event(), end._step

    def look() -> bool:
        if is_to_break.is_set():
            raise Broken("why")
        return bool(step())

    def break_it() -> None:
        is_to_break.set()
        with end._lock:
            end._wake_out.send(b"\0")

    end._step = look
    return break_it


def test_a_channel_whose_thread_fails_fails_the_calls_with_the_cause(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    failures: queue.SimpleQueue[BaseException | None],
) -> None:
    transport, service = ZmqTransport(), ToyService()
    one_thread = ServerSettings(num_threads=1)
    server = serve(transport, f"ipc://{tmp_path}/a", TOY, service, settings=one_thread)
    breaks = []
    connect = transport.connect

    def connect_to_break(address: str) -> ZmqChannel:
        channel = connect(address)
        breaks.append(break_thread(channel))
        return channel

    monkeypatch.setattr(transport, "connect", connect_to_break)
    with (
        contextlib.closing(Client(transport, server.address, TOY, timeout_s=WAIT_S)) as client,
        ThreadPoolExecutor(2) as pool,
    ):
        client.hello()
        once = pool.submit(client.call, "hold", 1)
        assert service.holding.acquire(timeout=WAIT_S)
        again = pool.submit(client.call, "add", 1)  # waits for the one thread
        breaks[0]()
        with pytest.raises(InternalError, match=r"persia-channel .*why") as caught:
            again.result(WAIT_S / 2)
        assert isinstance(caught.value.__cause__, Broken)
        with pytest.raises(ServiceUnavailable):
            once.result(WAIT_S / 2)
        with pytest.raises(InternalError, match=r"persia-channel .*why"):
            client.call("add", 1)
    assert isinstance(failures.get(timeout=WAIT_S), Broken)
    service.permits.release()
    server.stop()
    transport.close()


def test_a_listener_whose_thread_fails_says_so_where_a_process_looks(
    tmp_path: Path, failures: queue.SimpleQueue[BaseException | None]
) -> None:
    transport = ZmqTransport()
    listener = transport.listen(f"ipc://{tmp_path}/a")
    break_it = break_thread(listener)
    listener.start(lambda peer, parts: None, lambda reason: None)
    break_it()
    assert isinstance(failures.get(timeout=WAIT_S), Broken)
    transport.close()


def test_an_array_that_was_sent_is_let_go_of_and_what_came_outlives_its_socket(
    tmp_path: Path,
) -> None:
    class Memory(np.ndarray[Any, Any]):
        """An array that can be watched."""

    with (
        zmq.Context() as context,
        context.socket(zmq.PULL) as pull,
        context.socket(zmq.PUSH) as push,
    ):
        pull.bind(f"ipc://{tmp_path}/a")
        push.connect(f"ipc://{tmp_path}/a")
        array = np.arange(1 << 16, dtype=np.uint8).view(Memory)
        is_gone = threading.Event()
        weakref.finalize(array, is_gone.set)
        assert pull.poll(0) == 0
        assert multipart.receive(pull, 9, 1 << 30) is None
        assert push.poll(int(WAIT_S * 1000), zmq.POLLOUT)
        assert multipart.send(push, [b"head", array.data], 1 << 12)
        del array
        assert pull.poll(int(WAIT_S * 1000))
        received = multipart.receive(pull, 9, 1 << 30)
        assert received is not None
        deadline = time.monotonic() + WAIT_S
        while not is_gone.wait(0.001) and time.monotonic() < deadline:
            multipart.release()
        assert is_gone.is_set()
    parts, reason = received
    assert (bytes(parts[0]), len(parts[1]), reason) == (b"head", 1 << 16, "")
    got = np.frombuffer(parts[1], np.uint8)
    assert got.flags.writeable
    assert np.array_equal(got, np.arange(1 << 16, dtype=np.uint8))


def test_a_message_beyond_a_limit_is_taken_whole_and_dropped(tmp_path: Path) -> None:
    with zmq.Context() as context, context.socket(zmq.PAIR) as a, context.socket(zmq.PAIR) as b:
        a.bind("inproc://a")
        b.connect("inproc://a")
        for parts in ([b"1", b"2", b"3"], [b"12345", b"6"], [b"good"]):
            assert multipart.send(a, parts, 1 << 12)
        assert multipart.receive(b, 2, 100) == ([], "num_arrays")
        assert multipart.receive(b, 2, 5) == ([], "message_bytes")
        received = multipart.receive(b, 2, 5)
        assert received is not None
        assert bytes(received[0][0]) == b"good"
        assert multipart.receive(b, 2, 5) is None
        assert multipart.events(b) == zmq.POLLOUT
    with pytest.raises(zmq.ZMQError):
        multipart.send(a, [b"closed"], 1 << 12)


def test_an_exception_of_a_signal_as_a_message_is_sent_does_not_close_the_end(
    tmp_path: Path,
) -> None:
    class Interrupted(Outgoing):
        """A handler of the user's, such as one of SIGALRM, raises when it is to be sent."""

        def claim(self) -> bool:
            raise TimeoutError("of the user's")

    transport = ZmqTransport()
    listener = transport.listen(f"ipc://{tmp_path}/a")
    came: queue.SimpleQueue[Parts] = queue.SimpleQueue()
    listener.start(lambda peer, parts: came.put(parts), lambda reason: None)
    channel = transport.connect(listener.address)
    channel.start(lambda parts: None, lambda: None)
    with pytest.raises(TimeoutError):
        channel.send(Interrupted([b"1"]))
    channel.send(Outgoing([b"2"]))
    assert bytes(came.get(timeout=WAIT_S)[0]) == b"2"
    transport.close()


@pytest.mark.parametrize("number", range(5))  # each meets libzmq in another state
def test_a_connection_that_breaks_within_a_message_costs_that_message_alone(
    tmp_path: Path, number: int
) -> None:
    """A server that is killed at a bad moment must not take its clients along."""
    address = f"ipc://{tmp_path}/{number}"
    wait_ms = int(WAIT_S * 1000)
    with (
        zmq.Context() as context,
        context.socket(zmq.DEALER) as dealer,
        context.socket(zmq.ROUTER) as before,
        context.socket(zmq.ROUTER) as after,
        dealer.get_monitor_socket(zmq.EVENT_CONNECT_RETRIED) as monitor,
    ):
        dealer.setsockopt(zmq.IMMEDIATE, 1)
        dealer.setsockopt(zmq.LINGER, 0)
        before.bind(address)
        dealer.connect(address)

        class Cut(list[bytes]):
            """Whoever sends it finds the connection broken behind the first part."""

            def __iter__(self) -> Iterator[bytes]:
                yield self[0]
                before.close(linger=0)
                assert monitor.poll(wait_ms)
                multipart.events(dealer)  # takes note of it
                yield from self[1:]

        assert dealer.poll(wait_ms, zmq.POLLOUT)
        # Whether libzmq says so or drops it in silence is a matter of microseconds.
        multipart.send(dealer, Cut([b"1", b"2", b"3", b"4"]), 100)
        after.bind(address)
        assert dealer.poll(wait_ms, zmq.POLLOUT)
        assert multipart.send(dealer, [b"5", b"6"], 100)
        assert after.poll(wait_ms)
        assert after.recv_multipart()[1:] == [b"5", b"6"]
        dealer.disable_monitor()


def test_a_transport_that_is_closed_holds_no_array(tmp_path: Path) -> None:
    """What had not left is given back as the sockets close, when nobody sends any more."""

    class Memory(np.ndarray[Any, Any]):
        """An array that can be watched."""

    transport = ZmqTransport()
    listener = transport.listen(f"ipc://{tmp_path}/a")
    came_here, may_go_on = threading.Event(), threading.Event()

    def take(peer: bytes, parts: Parts) -> None:
        came_here.set()
        may_go_on.wait(WAIT_S)

    listener.start(take, lambda reason: None)
    channel = transport.connect(f"ipc://{tmp_path}/a")
    channel.start(lambda parts: None, lambda: None)
    gone = []
    for _ in range(20):
        array = np.zeros(1 << 21, np.uint8).view(Memory)
        gone.append(threading.Event())
        weakref.finalize(array, gone[-1].set)
        channel.send(Outgoing([b"head", array.data]))
        del array
    assert came_here.wait(WAIT_S)
    channel.close()
    may_go_on.set()
    transport.close()
    assert all(event.is_set() for event in gone)
