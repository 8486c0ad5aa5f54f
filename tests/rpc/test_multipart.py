"""Whole messages onto and off a ZeroMQ socket, and the memory of their parts."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq

from persia._rpc import multipart

WAIT_S = 20.0


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
            """Its sender finds the connection broken behind the first part."""

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
