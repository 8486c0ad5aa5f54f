"""Wires that drop, repeat, delay and cut, and that are silent.

In each case updates are applied once, and a call ends within its deadline: with its result or
with a typed error.
"""

from __future__ import annotations

import contextlib
import random
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from persia._rpc.messages import LookupRequest, TableGradients, TableSigns, UpdateRequest
from persia._rpc.methods import parameter_server
from persia.errors import ServiceTimeout, ServiceUnavailable
from tests.rpc.proxies import MessageProxy, TcpProxy
from tests.rpc.support import Wire
from tests.support.services import SCHEMA, make_servers, sign
from tests.support.waiting import PATIENCE_S, until

SLOT = SCHEMA.slots["sum"]
NUM_SIGNS = 2000
SIGNS = np.array([sign("sum", n) for n in range(NUM_SIGNS)], np.uint64)
ASK = (TableSigns(SLOT.table, SIGNS),)
STEP = np.float32(0.0625)  # what an update takes off every value, at SGD's rate of 0.5


def update(number: int) -> UpdateRequest:
    gradients = np.full((NUM_SIGNS, SLOT.dim), 2 * STEP, np.float32)
    return UpdateRequest((9, number), (TableGradients(SLOT.table, SIGNS, None, gradients),))


def rows(plain: Any) -> Any:
    return plain.lookup(LookupRequest(0, False, ASK)).tables[0].rows


def served(wire: Wire) -> tuple[Any, str]:
    """A parameter server with constant rows, and where it listens."""
    (plain,) = make_servers(1)
    plain.lookup(LookupRequest(0, True, ASK))
    return plain, wire.serve(plain, role=parameter_server()).address


def check_applied_once(plain: Any, before: Any, num_updates: int) -> None:
    for _ in range(num_updates):
        before = before - STEP
    np.testing.assert_array_equal(rows(plain), before)


def test_updates_are_applied_once_through_drops_and_repetitions(
    ipc_wire: Wire, tmp_path: Path
) -> None:
    dice = random.Random(7)
    plain, address = served(ipc_wire)
    before = rows(plain)
    proxy = MessageProxy(
        f"ipc://{tmp_path}/proxy", address, lambda number: dice.choice((0, 1, 1, 2, 3))
    )
    client = ipc_wire.client(proxy.address, role=parameter_server(), attempt_s=0.05)
    with contextlib.closing(proxy), ThreadPoolExecutor(4) as pool:
        calls = [pool.submit(client.call, "update", update(n)) for n in range(40)]
        for call in calls:
            call.result(PATIENCE_S)
        # What was repeated last may still be on its way: it changes nothing either.
        client.hello()
    check_applied_once(plain, before, 40)
    assert proxy.num_dropped > 5
    assert proxy.num_repeated > 5
    assert client.stats()["sent_again"] >= 5


def test_what_may_not_be_repeated_is_sent_once(ipc_wire: Wire, tmp_path: Path) -> None:
    server, service = ipc_wire.serve_toy()
    front = f"ipc://{tmp_path}/proxy"
    fate = lambda number: int(number != 1)  # noqa: E731
    with contextlib.closing(MessageProxy(front, server.address, fate)):
        client = ipc_wire.client(front, attempt_s=0.01)
        call = client.begin("add_once", 1)
        until(lambda: call.was_sent)
        call._deadline = time.monotonic() + 0.1
        with pytest.raises(ServiceTimeout):
            call.result()
        client.call("add", 2)  # which may be, and on a busy machine is
    assert set(service.calls) == {("add", 2)}


def test_updates_are_applied_once_through_cuts(tcp_wire: Wire) -> None:
    """Cut in the handshake, in a request, in an answer, and between them."""
    plain, address = served(tcp_wire)
    before = rows(plain)
    cuts = (10, 100, 500, 20_000, 60_000, 100_000, 150_000, 49_000, 98_000, None)
    proxy = TcpProxy(address, cuts)
    client = tcp_wire.client(proxy.address, role=parameter_server())
    with contextlib.closing(proxy), ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(client.call, "update", update(n)) for n in range(12)]
        for call in calls:
            call.result(PATIENCE_S)
        found = client.call("lookup", LookupRequest(0, False, ASK)).tables[0].rows
        np.testing.assert_array_equal(found, rows(plain))
    check_applied_once(plain, before, 12)
    assert proxy.num_cut == len(cuts) - 1


def test_a_client_behind_a_dead_wire_is_given_up_and_others_are_served(
    tcp_wire: Wire, silence_wire: Wire
) -> None:
    """Half open: the server learns by silence alone that the client is gone."""
    server, service, other = silence_wire.toy(num_threads=3)
    proxy = TcpProxy(server.address)
    lost = tcp_wire.client(proxy.address)  # notices nothing itself
    with ThreadPoolExecutor(2) as pool:
        held = [pool.submit(lost.call, "hold", number) for number in range(2)]
        service.await_held(len(held))
        proxy.hold()
        assert proxy.server_has_closed(PATIENCE_S)
        # Their answers have no taker. libzmq closes a connection a moment before it reports
        # the socket, and what is sent in between it drops without a word: hence two.
        for _ in held:
            service.permits.release()
            for _ in range(50):
                assert other.call("add", 1) >= 1
        while not server.stats().get("dropped.peer_gone", 0):
            assert other.call("add", 1) >= 1
        proxy.close()
        for call in held:
            with pytest.raises(ServiceUnavailable):
                call.result(PATIENCE_S)
        assert other.stats().get("lost", 0) == 0


def test_a_server_that_is_silent_for_longer_than_the_heartbeat(
    tcp_wire: Wire, silence_wire: Wire
) -> None:
    """Half open, seen from the client."""
    plain, address = served(tcp_wire)
    with contextlib.closing(TcpProxy(address)) as proxy, ThreadPoolExecutor(3) as pool:
        client = silence_wire.client(proxy.address, role=parameter_server())
        before = rows(plain)
        client.hello()
        proxy.hold()
        updates = [pool.submit(client.call, "update", update(n)) for n in range(3)]
        # It may not be repeated, so it ends when the silence has been noticed.
        with pytest.raises((ServiceUnavailable, ServiceTimeout)):
            client.call("set_embedding", [], timeout_s=2.0)
        until(lambda: client.stats().get("lost", 0) >= 1)
        proxy.go()
        for one in updates:
            one.result(PATIENCE_S)
        check_applied_once(plain, before, 3)
        assert client.stats()["sent_again"] >= 1
