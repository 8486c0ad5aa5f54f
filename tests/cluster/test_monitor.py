"""Servers that come back at the addresses of other replicas."""

from __future__ import annotations

import threading

import pytest

from persia._cluster import monitor
from persia._cluster.connect import connect_parameter_servers
from persia.errors import RemoteError
from tests.cluster.place import PATIENCE_S, Monkey, Place, hosts_of
from tests.support.waiting import until


def test_two_servers_that_come_back_with_each_others_addresses(
    place: Place, monkeypatch: Monkey
) -> None:
    monkeypatch.setattr(monitor, "_CHECK_S", 0.2)
    first = place.serve(0, 2, "tcp://127.0.0.1:0")
    port = first.address.rpartition(":")[2]
    second = place.serve(1, 2, f"tcp://127.0.0.2:{port}")
    hosts_of(monkeypatch, {"servers": ["127.0.0.1", "127.0.0.2"]})
    restarted: list[int] = []
    found = connect_parameter_servers(
        place.transport,
        addresses=[f"servers:{port}"],
        timeout_s=PATIENCE_S,
        on_restart=restarted.append,
    )
    for server in (first, second):
        server.stop()
    swapped = [
        place.serve(0, 2, f"tcp://127.0.0.2:{port}"),
        place.serve(1, 2, f"tcp://127.0.0.1:{port}"),
    ]
    for remote, server in zip(found, swapped, strict=True):
        # These have no method but hello: who is asked says what it lacks.
        with pytest.raises(RemoteError, match="no attribute 'stats'"):
            remote.client.call("stats")
        assert remote.client.address == server.address
        assert remote.client.incarnation == server.hello.incarnation
    assert sorted(restarted) == [0, 1]
    for remote in found:
        remote.close()
    until(lambda: not any("persia-monitor" in t.name for t in threading.enumerate()))
