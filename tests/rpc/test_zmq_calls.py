"""Messages onto and off a ZeroMQ socket, the memory of their parts, and who receives."""

from __future__ import annotations

import itertools
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType

import numpy as np
import pytest
import zmq

from persia._rpc import zmq_calls
from persia._rpc.client import Client
from persia._rpc.frame import Part
from persia.errors import ServiceTimeout
from tests.rpc.conftest import WAITING
from tests.rpc.support import Wire, watched
from tests.support.streams import Background
from tests.support.waiting import PATIENCE_S


def test_an_array_that_was_sent_is_let_go_of_and_what_came_outlives_its_socket(
    tmp_path: Path,
) -> None:
    received: list[tuple[list[Part], str]] = []
    with (
        zmq.Context() as context,
        context.socket(zmq.PULL) as pull,
        context.socket(zmq.PUSH) as push,
    ):
        pull.bind(f"ipc://{tmp_path}/a")
        push.connect(f"ipc://{tmp_path}/a")
        array, is_gone = watched(1 << 16)
        assert pull.poll(0) == 0
        assert not zmq_calls.receive(pull, 9, 1 << 30, received)
        assert push.poll(int(PATIENCE_S * 1000), zmq.POLLOUT)
        assert zmq_calls.send(push, [b"head", array.data], 1 << 12)
        del array
        assert pull.poll(int(PATIENCE_S * 1000))
        assert zmq_calls.receive(pull, 9, 1 << 30, received)
        deadline = time.monotonic() + PATIENCE_S
        while not is_gone.wait(0.001) and time.monotonic() < deadline:
            zmq_calls.release()
        assert is_gone.is_set()
    ((parts, reason),) = received
    assert (bytes(parts[0]), len(parts[1]), reason) == (b"head", 1 << 16, "")
    got = np.frombuffer(parts[1], np.uint8)
    assert got.flags.writeable
    assert np.array_equal(got, np.arange(1 << 16, dtype=np.uint8))


def test_a_message_beyond_a_limit_is_taken_whole_and_dropped() -> None:
    received: list[tuple[list[Part], str]] = []
    with zmq.Context() as context, context.socket(zmq.PAIR) as a, context.socket(zmq.PAIR) as b:
        a.bind("inproc://a")
        b.connect("inproc://a")
        for parts in ([b"1", b"2", b"3"], [b"12345", b"6"], [b"good"]):
            assert zmq_calls.send(a, parts, 1 << 12)
        for max_bytes in (100, 5, 5):
            assert zmq_calls.receive(b, 2, max_bytes, received)
        assert received[:2] == [([], "num_arrays"), ([], "message_bytes")]
        assert bytes(received[2][0][0]) == b"good"
        assert not zmq_calls.receive(b, 2, 5, received)
        assert zmq_calls.events(b) == zmq.POLLOUT
    with pytest.raises(zmq.ZMQError):
        zmq_calls.send(a, [b"closed"], 1 << 12)


@pytest.mark.parametrize("number", range(5))  # each meets libzmq in another state
def test_a_connection_that_breaks_within_a_message_costs_that_message_alone(
    tmp_path: Path, number: int
) -> None:
    """A server that is killed at a bad moment must not take its clients along."""
    address = f"ipc://{tmp_path}/{number}"
    wait_ms = int(PATIENCE_S * 1000)
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
            """Its sender finds the connection broken behind the first part."""

            def __iter__(self) -> Iterator[bytes]:
                yield self[0]
                before.close(linger=0)
                assert monitor.poll(wait_ms)
                zmq_calls.events(dealer)  # takes note of it
                yield from self[1:]

        assert dealer.poll(wait_ms, zmq.POLLOUT)
        # Whether libzmq says so or drops it in silence is a matter of microseconds.
        zmq_calls.send(dealer, Cut([b"1", b"2", b"3", b"4"]), 100)
        after.bind(address)
        assert dealer.poll(wait_ms, zmq.POLLOUT)
        assert zmq_calls.send(dealer, [b"5", b"6"], 100)
        assert after.poll(wait_ms)
        assert after.recv_multipart()[1:] == [b"5", b"6"]
        dealer.disable_monitor()


def test_one_thread_has_many_calls_in_flight(wire: Wire) -> None:
    _, service, client = wire.toy()
    held = client.begin("hold", 7)
    service.await_held()
    sizes = [*range(20), *range(3000, 3020)]
    begun = [client.begin("fill", size) for size in sizes]
    for size, flight in reversed([*zip(sizes, begun, strict=True)]):
        np.testing.assert_array_equal(flight.result().signs, np.arange(size, dtype=np.uint64))
    service.permits.release()
    assert held.result() == 7
    assert not client._pending


def test_a_call_that_is_cancelled_leaves_nothing_behind(wire: Wire) -> None:
    _, service, client = wire.toy()
    held = client.begin("hold", 1)
    service.await_held()
    held.cancel()
    assert not client._pending
    service.permits.release()
    assert client.call("fill", 2).signs.tolist() == [0, 1]


@WAITING
def test_a_caller_who_gives_up_leaves_its_turn(wire: Wire) -> None:
    _, service, client = wire.toy()
    impatient = client.begin("hold", 1, timeout_s=0.3)
    service.await_held()
    other = Background(lambda: client.call("hold", 2))
    with pytest.raises(ServiceTimeout):
        impatient.result()
    service.await_held()
    service.permits.release(2)
    assert other.result() == 2


class Interrupted(Exception):
    """What a test's signal raises."""


def test_a_signal_in_who_receives_loses_nobodys_answer(wire: Wire) -> None:
    """The main thread is interrupted wherever it is; the others' answers all come."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        # Within the call, and not in a weak reference's callback, where nothing may be raised.
        is_ours = frame is not None and "_rpc" in frame.f_code.co_filename
        while is_ours and frame is not None:
            if frame.f_code is Client.call.__code__:
                raise Interrupted
            frame = frame.f_back

    def ask(client_number: int) -> int:
        num_asked = 0
        while not is_enough.is_set():
            size = client_number * 1000 + num_asked % 100
            assert client.call("fill", size).signs.size == size
            num_asked += 1
        return num_asked

    is_enough = threading.Event()
    _, _, client = wire.toy()
    with ThreadPoolExecutor(2) as pool:
        others = [pool.submit(ask, number) for number in range(2)]
        before = signal.signal(signal.SIGALRM, interrupt)
        num_interrupted = 0
        try:
            # Other moments each time.
            for number in itertools.count():
                signal.setitimer(signal.ITIMER_REAL, 1e-4 + number % 97 * 1e-5)
                try:
                    for _ in range(50):
                        client.call("fill", 10)
                except Interrupted:
                    num_interrupted += 1
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0.0)
                if num_interrupted == 200:
                    break
        finally:
            signal.signal(signal.SIGALRM, before)
            is_enough.set()
        assert all(other.result(PATIENCE_S) for other in others)
        assert not client.stats().get("sent_again")
        assert client.call("fill", 1).signs.tolist() == [0]


def test_the_own_thread_sleeps_while_a_caller_receives_for_long(wire: Wire) -> None:
    _, service, client = wire.toy()
    held = Background(lambda: client.call("hold", 7))
    service.await_held()
    before = num_waits(client)
    threading.Event().wait(0.5)  # nothing is to happen meanwhile
    # Fifty looks a second, times each data-loader and each of its ranks, are too many.
    assert num_waits(client) - before < 8
    service.permits.release()
    assert held.result() == 7
    # No answer waits for it afterwards.
    assert client.call("add", 1) == 1


def num_waits(client: Client) -> int:
    """How often a channel's own thread has begun to wait."""
    thread = client._channel._thread
    assert thread is not None
    status = Path(f"/proc/self/task/{thread.native_id}/status").read_text()
    (line,) = [line for line in status.splitlines() if line.startswith("voluntary")]
    return int(line.split()[1])
