"""Finding servers: names of several hosts, sets that are not whole, sets that are mixed."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from persia._cluster import discovery
from persia._cluster.connect import connect_embedding_workers, connect_nn_workers
from persia._rpc.messages import WireDtypes
from persia._rpc.methods import embedding_worker, nn_worker
from persia.config import EmbeddingSchema, schema_fingerprint
from persia.errors import ConfigError, JobFinished, RemoteError, ServiceUnavailable
from tests.cluster.place import Monkey, Place, hosts_of
from tests.support.processes import loopback_host
from tests.support.waiting import PATIENCE_S, until


@pytest.fixture(autouse=True)
def _lines_come_soon(monkeypatch: Monkey) -> None:
    monkeypatch.setattr(discovery, "_LINE_S", 0.3)


def clock_that_skips(monkeypatch: Monkey) -> Callable[[float], None]:
    """Let the clock of searches skip the seconds given at each call of what is returned."""
    skipped: list[float] = []
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + sum(skipped))
    monkeypatch.setattr(discovery, "time", clock)
    return skipped.append


def test_w69_the_set_is_ready_when_all_of_it_is(place: Place) -> None:
    place.serve(0, 2)

    missing = f"embedding-parameter-server 1 of 2 is missing: no connection to {place.ipc(1)}"

    def start_the_other(line: str) -> None:
        if line == missing and len(place.servers) == 1:
            place.serve(1, 2)

    assert place.find(place.ipc(0), place.ipc(1), on_wait=start_the_other) == [0, 1]


def test_who_is_missing_is_named_within_seconds(
    place: Place, caplog: pytest.LogCaptureFixture, monkeypatch: Monkey
) -> None:
    skip = clock_that_skips(monkeypatch)
    place.serve(1, 3)
    missing = "embedding-parameter-server 0, 2 of 3 is missing"

    def give_up(line: str) -> None:
        if line.startswith(missing):
            skip(PATIENCE_S)

    listed = [place.ipc(number) for number in range(3)]
    with pytest.raises(ServiceUnavailable) as raised:
        place.find(*listed, timeout_s=PATIENCE_S, on_wait=give_up)
    text = str(raised.value)
    ending = f"; waited {PATIENCE_S:g} s"
    assert text == (
        f"{missing}: no connection to {place.ipc(0)}; no connection to {place.ipc(2)}{ending}"
    )
    assert (raised.value.role, raised.value.replica) == ("embedding-parameter-server", 0)
    lines = [record.message for record in caplog.records if "waiting: " in record.message]
    assert lines[-1] == f"waiting: {text.removesuffix(ending)}"


def test_w53_a_server_that_hangs_is_waited_for_no_longer_than_the_deadline(
    place: Place, monkeypatch: Monkey
) -> None:
    skip = clock_that_skips(monkeypatch)
    # Listens; what comes is never read.
    listener = place.transport.listen(place.ipc("hung"))
    silent = f"no answer from {place.ipc('hung')}, to which there is a connection"

    def give_up(line: str) -> None:
        if silent in line:
            skip(PATIENCE_S)

    with pytest.raises(ServiceUnavailable, match=silent):
        place.find(place.ipc("hung"), timeout_s=PATIENCE_S, on_wait=give_up)
    listener.close(0.0)


@pytest.mark.parametrize(
    ("sets", "says"),
    [
        ([(0, 2)], r"1 of 2 is missing: the list of .* given leads only to embed"),
        ([(0, 2), (1, 3)], r"mixed: .* 0 of 2 at .*/a, and .* 1 of 3 at .*/b"),
        ([(0, 2), (0, 2)], r"one number: .* 0 of 2 at .*/a, and another"),
    ],
)
def test_sets_that_lack_a_server_or_are_mixed_are_an_error_at_once(
    place: Place, sets: list[tuple[int, int]], says: str
) -> None:
    names = iter("ab")
    listed = [place.serve(*each, place.ipc(next(names))).address for each in sets]
    with pytest.raises(ConfigError, match=says):
        place.find(*listed)


def test_two_that_each_say_that_they_are_alone(place: Place) -> None:
    place.serve(0, 1, place.ipc("a"))
    lines: list[str] = []

    def start_the_other(line: str) -> None:
        if "lists more addresses than the 1" in line and not lines:
            lines.append(line)
            place.serve(0, 1, place.ipc("b"))

    with pytest.raises(ConfigError, match=r"two servers have one number: .*/[ab], and another"):
        place.find(place.ipc("a"), place.ipc("b"), on_wait=start_the_other)
    assert "/b has not answered" in lines[0]


def test_two_embedding_configs_are_told_apart_by_slot(place: Place) -> None:
    for number, dim in enumerate((8, 16)):
        schema = EmbeddingSchema.load({"slots_config": {"item": {"dim": dim}}})
        place.serve(number, 2, fingerprint=schema_fingerprint(schema))
    said = r"slots_config.item.dim is 8 at ipc://\S*/0 and 16 at ipc://\S*/1; slots"
    with pytest.raises(ConfigError, match=said):
        place.find(place.ipc(0), place.ipc(1))


def test_servers_that_send_floats_in_different_dtypes_are_refused(place: Place) -> None:
    for number, dtype in enumerate(("float32", "bfloat16")):
        place.serve(number, 2, wire=WireDtypes("float16", dtype))
    said = "row_dtype: float16, gradient_dtype: float32, and row_dtype: float16, gradient_dt"
    with pytest.raises(ConfigError, match=rf"have different wire_config: {said}"):
        place.find(place.ipc(0), place.ipc(1))


def test_a_server_that_two_addresses_lead_to_counts_once(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PERSIA_LISTEN_WITHOUT_KEYS", "1")
    port = place.serve(0, 1, "tcp://0.0.0.0:0").address.rpartition(":")[2]
    assert place.find(f"127.0.0.1:{port}", f"127.0.0.2:{port}") == [0]


def test_a_server_that_was_replaced_while_the_set_came_together(place: Place) -> None:
    old = place.serve(0, 2)

    def replace(line: str) -> None:
        if "lists more addresses than the 1" in line and len(place.servers) == 1:
            old.stop()
            for number in range(3):
                place.serve(number, 3)

    listed = [place.ipc(number) for number in range(3)]
    assert place.find(*listed, on_wait=replace) == [0, 1, 2]


def test_no_server_answers_or_is_waited_for(place: Place) -> None:
    with pytest.raises(ServiceUnavailable, match="no embedding-parameter-server answers: no "):
        place.find("127.0.0.1:1", timeout_s=0.1)
    with pytest.raises(JobFinished, match="no longer needed, no nn-worker answers"):
        connect_nn_workers(place.transport, addresses=["127.0.0.1:1"], should_stop=lambda: True)


def test_no_thread_or_file_is_left_of_a_hundred_searches(place: Place) -> None:
    def left() -> tuple[int, int]:
        return threading.active_count(), len(list(Path("/proc/self/fd").iterdir()))

    place.serve(0, 1)
    for number in range(120):
        assert place.find(place.ipc(0)) == [0]
        if number == 20:
            num_threads, num_files = left()
    # The server closes what a client has left in its own time.
    until(lambda: left()[0] <= num_threads, PATIENCE_S, details=left)
    until(lambda: left()[1] <= num_files + 20, PATIENCE_S, details=left)


def test_hosts_may_join_a_name_later(place: Place, monkeypatch: Monkey) -> None:
    monkeypatch.setattr(discovery, "_RESOLVE_S", 0.05)
    port = place.at_hosts(0, 1, size=2)
    led: dict[str, list[str]] = {}
    hosts_of(monkeypatch, led)
    unknown = f"tcp://servers:{port} cannot be resolved: Name or service not known"

    def join(line: str) -> None:
        if unknown in line:
            led["servers"] = ["127.0.0.2", "127.0.0.1"]

    assert place.find(f"servers:{port}", on_wait=join) == [0, 1]
    assert "servers" in led


def test_a_server_that_has_got_the_address_of_another_meanwhile(
    place: Place, monkeypatch: Monkey
) -> None:
    before = place.serve(0, 3, "tcp://127.0.0.1:0")
    port = int(before.address.rpartition(":")[2])
    hosts = [f"127.0.0.{number}" for number in (1, 2, 3)]
    hosts_of(monkeypatch, {"servers": hosts})

    def move(line: str) -> None:
        if "1, 2 of 3 is missing" in line and len(place.servers) == 1:
            before.stop()
            for host, number in zip(hosts, (1, 0, 2), strict=True):
                place.serve(number, 3, f"tcp://{host}:{port}")

    assert place.find(f"servers:{port}", on_wait=move) == [0, 1, 2]


def test_a_server_that_comes_back_at_another_host_is_found_there(
    place: Place, monkeypatch: Monkey, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(discovery, "_CHECK_S", 0.2)
    port = place.at_hosts(0, 1, size=2)
    led = {"servers": ["127.0.0.1", "127.0.0.2"]}
    hosts_of(monkeypatch, led)
    restarted: list[int] = []
    with place.connected(f"servers:{port}", on_restart=restarted.append) as found:
        place.servers[1].stop()
        until(lambda: found[1].client.stats().get("lost", 0))
        led["servers"] = ["127.0.0.1", "127.0.0.3"]
        place.serve(1, 2, f"tcp://127.0.0.3:{port}")
        # Waits, was never sent, and so goes to the new place whatever it is.
        with pytest.raises(RemoteError, match="no attribute 'clear_embeddings'"):
            found[1].client.call("clear_embeddings")
        assert restarted == [1]
        assert found[1].client.address == f"tcp://127.0.0.3:{port}"
    assert f"1 is now at tcp://127.0.0.3:{port}, and no more at" in caplog.text
    until(lambda: not any("persia-monitor" in t.name for t in threading.enumerate()))


def test_a_name_of_one_host_is_left_to_the_transport(place: Place) -> None:
    port = place.serve(0, 1, "tcp://127.0.0.1:0").address.rpartition(":")[2]
    with place.connected(f"localhost:{port}") as (server,):
        assert server.client.address == f"tcp://localhost:{port}"


def test_a_look_up_that_hangs_does_not_outlast_the_deadline(
    place: Place, monkeypatch: Monkey
) -> None:
    asked, goes_on = threading.Event(), threading.Event()

    def hang(host: str, port: int, **_: object) -> list[Any]:
        asked.set()
        goes_on.wait(PATIENCE_S)
        return []

    monkeypatch.setattr(socket, "getaddrinfo", hang)
    with pytest.raises(ServiceUnavailable, match="tcp://slow:1 is being looked up"):
        place.find("slow:1", timeout_s=0.1)
    assert asked.wait(PATIENCE_S)
    goes_on.set()


def test_each_rank_or_each_node_of_ranks_that_share_evenly_has_an_entry(place: Place) -> None:
    for number in range(2):
        place.serve(number, 2, role=nn_worker())
    assert place.find(place.ipc(1), place.ipc(0), connect=connect_nn_workers) == [0, 1]
    hosts, port = [loopback_host(which) for which in range(2)], 20000
    for rank in range(4):
        address = f"tcp://{hosts[rank // 2]}:{port + rank % 2}"
        place.serve(rank, 4, address, role=nn_worker())
    listed = [f"{host}:{port}" for host in reversed(hosts)]
    assert place.find(*listed, connect=connect_nn_workers) == [0, 1, 2, 3]
    uneven = (place.ipc(f"uneven-{number}") for number in range(2))
    listed = [place.serve(n, 3, one, role=nn_worker()).address for n, one in enumerate(uneven)]
    with pytest.raises(ConfigError, match=r"each of 3 ranks, .* share them evenly, got 2"):
        place.find(*listed, connect=connect_nn_workers)


def test_embedding_workers_are_found_by_the_environment(
    place: Place, monkeypatch: Monkey
) -> None:
    place.serve(0, 1, role=embedding_worker())
    monkeypatch.setenv("PERSIA_EMBEDDING_WORKERS", place.ipc(0))
    assert place.find(connect=connect_embedding_workers) == [0]
    with pytest.raises(ConfigError, match="expected embedding-parameter-server, found embed"):
        place.find(place.ipc(0))


def test_two_servers_that_come_back_with_each_others_addresses(
    place: Place, monkeypatch: Monkey
) -> None:
    monkeypatch.setattr(discovery, "_CHECK_S", 0.2)
    port = place.at_hosts(0, 1, size=2)
    hosts_of(monkeypatch, {"servers": ["127.0.0.1", "127.0.0.2"]})
    restarted: list[int] = []
    with place.connected(f"servers:{port}", on_restart=restarted.append) as found:
        for server in place.servers:
            server.stop()
        swapped = [
            place.serve(0, 2, f"tcp://127.0.0.2:{port}"),
            place.serve(1, 2, f"tcp://127.0.0.1:{port}"),
        ]
        for remote, server in zip(found, swapped, strict=True):
            # These have no method but hello: the one that is asked says what it lacks.
            with pytest.raises(RemoteError, match="no attribute 'stats'"):
                remote.client.call("stats")
            assert remote.client.address == server.address
            assert remote.client.incarnation == server.hello.incarnation
        assert sorted(restarted) == [0, 1]
    until(lambda: not any("persia-monitor" in t.name for t in threading.enumerate()))
