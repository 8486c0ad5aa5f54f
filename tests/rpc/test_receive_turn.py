"""Calls in flight on one channel, and the caller that receives their answers."""

from __future__ import annotations

import itertools
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType

import numpy as np
import pytest

from persia._rpc.client import Client
from persia.errors import DataTypeError, ServiceTimeout, ServiceUnavailable
from tests.rpc.conftest import WAITING
from tests.rpc.support import PATIENCE_S, Wire, make_client, toy


def test_one_thread_has_many_calls_in_flight(wire: Wire) -> None:
    with toy(wire) as (client, service):
        held = client.begin("hold", 7)
        service.await_held()
        sizes = [*range(20), *range(3000, 3020)]
        begun = [client.begin("fill", size) for size in sizes]
        for size, flight in reversed([*zip(sizes, begun, strict=True)]):
            np.testing.assert_array_equal(
                flight.result().signs, np.arange(size, dtype=np.uint64)
            )
        service.permits.release()
        assert held.result() == 7
        assert not client._pending


def test_a_call_that_is_cancelled_leaves_nothing_behind(wire: Wire) -> None:
    with toy(wire) as (client, service):
        held = client.begin("hold", 1)
        service.await_held()
        held.cancel()
        assert not client._pending
        service.permits.release()
        assert client.call("fill", 2).signs.tolist() == [0, 1]


def test_what_cannot_be_begun_says_so_at_once_or_at_the_result(wire: Wire) -> None:
    with make_client(wire, wire.address(), timeout_s=0.05) as client:
        with pytest.raises(DataTypeError):
            client.begin("fill", "many")
        with pytest.raises(ServiceUnavailable, match=r"no connection within 0\.05 s, for fill"):
            client.begin("fill", 3).result()
        client.close()
        with pytest.raises(ServiceUnavailable, match="the client was closed"):
            client.begin("fill", 3).result()
        assert not client._pending


def test_a_caller_who_waits_longer_receives_for_the_others(wire: Wire) -> None:
    with toy(wire) as (client, service), ThreadPoolExecutor(3) as pool:
        first = pool.submit(client.call, "hold", 1)
        service.await_held()
        # These come while the first one waits, and the last ones when it has gone.
        assert [client.call("fill", n).signs.size for n in range(50)] == [*range(50)]
        second = pool.submit(client.call, "hold", 2)
        service.await_held()
        service.permits.release(2)
        assert first.result(PATIENCE_S) == 1
        assert second.result(PATIENCE_S) == 2
        others = [pool.submit(client.call, "fill", n) for n in range(100)]
        assert [other.result(PATIENCE_S).signs.size for other in others] == [*range(100)]


@WAITING
def test_a_caller_who_gives_up_leaves_its_turn(wire: Wire) -> None:
    with toy(wire) as (client, service), ThreadPoolExecutor(1) as pool:
        impatient = client.begin("hold", 1, timeout_s=0.3)
        service.await_held()
        other = pool.submit(client.call, "hold", 2)
        with pytest.raises(ServiceTimeout):
            impatient.result()
        service.await_held()
        service.permits.release(2)
        assert other.result(PATIENCE_S) == 2


def test_closing_ends_the_call_of_who_receives(wire: Wire) -> None:
    with toy(wire) as (client, service), ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(client.call, "hold", n) for n in range(2)]
        service.await_held(2)
        client.close()
        for call in calls:
            with pytest.raises(ServiceUnavailable, match="the client was closed"):
                call.result(PATIENCE_S)


class Interrupted(Exception):
    """What a test's signal raises."""


def test_a_signal_in_who_receives_loses_nobodys_answer(zmq_wire: Wire) -> None:
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
    with toy(zmq_wire) as (client, _), ThreadPoolExecutor(2) as pool:
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


def test_the_own_thread_sleeps_while_a_caller_receives_for_long(zmq_wire: Wire) -> None:
    with toy(zmq_wire) as (client, service), ThreadPoolExecutor(1) as pool:
        held = pool.submit(client.call, "hold", 7)
        service.await_held()
        before = num_waits(client)
        threading.Event().wait(0.5)  # nothing is to happen meanwhile
        # Fifty looks a second, times each data-loader and each of its ranks, are too many.
        assert num_waits(client) - before < 8
        service.permits.release()
        assert held.result(PATIENCE_S) == 7
        # No answer waits for it afterwards.
        assert client.call("add", 1) == 1


def num_waits(client: Client) -> int:
    """How often a channel's own thread has begun to wait."""
    thread = client._channel._thread  # type: ignore[attr-defined]
    status = Path(f"/proc/self/task/{thread.native_id}/status").read_text()
    (line,) = [line for line in status.splitlines() if line.startswith("voluntary")]
    return int(line.split()[1])
