"""Copies of servers and a cache before them: the same bits, no zeros for a row there is."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from persia import env
from persia._core.base.hashing import owners, route
from persia._rpc.messages import (
    LookupReply,
    LookupRequest,
    TableRows,
    TableSigns,
    UpdateRequest,
)
from persia._rpc.methods import parameter_server
from persia._rpc.server import Server, serve
from persia._rpc.stubs import RemoteParameterServer
from persia._rpc.zmq_transport import ZmqTransport
from persia._serving import remote_rows
from persia._serving.remote_rows import (
    CachedServer,
    CopiedServer,
    RemoteRows,
    RowCache,
    RowServers,
    _CopiesClient,
)
from persia.errors import ConfigError, NotAllowed, ServiceBusy, ServiceError
from tests.serving.models import PATIENT
from tests.support.fixtures import Monkey
from tests.support.services import SCHEMA, features, make_servers, make_worker
from tests.support.waiting import PATIENCE_S, until

BATCH = {"sum": [[1, 2], [3]], "sqrt": [[4], [5, 6]], "mean": [[7], [8]]}


class Place:
    """Two replicas with rows, each served by two processes' worth of servers."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.transport = folder, ZmqTransport()
        self.rows = make_servers(2)
        trainer = make_worker(list(self.rows))
        for number in range(3):
            trainer.lookup(trainer.register(features(BATCH, number)), True)
        self.expected = trainer.lookup_direct(features(BATCH, 9, requires_grad=False))
        trainer.close()
        self.running: dict[str, Server] = {}
        for replica in range(2):
            for copy in "ab":
                self.begin(replica, copy)

    def address(self, replica: int, copy: str) -> str:
        return f"ipc://{self.folder}/{replica}{copy}"

    def begin(self, replica: int, copy: str) -> None:
        address = self.address(replica, copy)
        rows = self.rows[replica]
        self.running[address] = serve(self.transport, address, parameter_server(), rows)

    def end(self, replica: int, copy: str) -> None:
        address = self.address(replica, copy)
        self.running.pop(address).stop(PATIENCE_S)
        Path(address[6:]).unlink(missing_ok=True)

    def connect(self) -> list[CopiedServer]:
        return [
            CopiedServer.connect_copies(
                self.transport,
                [self.address(replica, copy) for copy in "ab"],
                timeout_s=PATIENCE_S,
            )
            for replica in range(2)
        ]


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    made = Place(tmp_path)
    yield made
    for server in made.running.values():
        server.stop(PATIENCE_S)
    made.transport.close()


def check(place: Place, worker: Any, number: int = 0) -> bool:
    got = worker.lookup_direct(features(BATCH, number, requires_grad=False))
    outputs: Any = zip(got.outputs, place.expected.outputs, strict=True)
    for one, other in outputs:
        assert one.values.any()
        np.testing.assert_array_equal(one.values, other.values)
    return True


def new_cache(**options: Any) -> RowCache:
    dims = [table.dim for table in SCHEMA.tables]
    return RowCache(dims, **options)


def test_a_worker_takes_copies_and_one_may_die_and_come_back(place: Place) -> None:
    servers = place.connect()
    with closing(make_worker(list(servers))) as worker:
        check(place, worker)
        counts = servers[0].client.stats
        until(lambda: check(place, worker) and counts()["copies_used"] == 2)
        place.end(0, "a")
        for number in range(20):
            check(place, worker, number)
        until(lambda: check(place, worker) and counts()["copies_used"] == 1)
        place.begin(0, "a")
        until(lambda: check(place, worker) and counts()["copies_used"] == 2)
        place.end(0, "b")
        for number in range(20):
            check(place, worker, number)
    for server in servers:
        server.close()


def test_the_cache_changes_no_bit_and_is_flushed(place: Place) -> None:
    now = [0.0]
    caches = [new_cache(clock=lambda: now[0]) for _ in range(2)]
    servers = [
        CachedServer.before(server, cache)
        for server, cache in zip(place.connect(), caches, strict=True)
    ]
    with closing(make_worker(list(servers))) as worker:
        check(place, worker)
        assert sum(cache.stats()["rows"] for cache in caches) == 8
        check(place, worker)
        assert sum(cache.stats()["hits"] for cache in caches) == 8
        now[0] = 0.6  # the half before
        check(place, worker)
        assert sum(cache.stats()["hits"] for cache in caches) == 16
        now[0] = 1.1
        check(place, worker)
        assert sum(cache.stats()["hits"] for cache in caches) == 16
        for cache in caches:
            cache.flush()
        assert sum(cache.stats()["rows"] for cache in caches) == 0
        check(place, worker)
    for server in servers:
        server.close()


def test_an_id_without_a_row_is_asked_for_again_and_the_bound_holds(place: Place) -> None:
    (server, other) = place.connect()
    other.close()
    cache = new_cache(max_rows=2)
    cached = CachedServer.before(server, cache)
    signs = np.arange(50, 250, dtype=np.uint64)
    order, starts = route(signs, owners(2), 2)
    mine = signs[order[starts[0] : starts[1]]][:10]
    request = LookupRequest(0, False, (TableSigns(0, mine),))
    for _ in range(2):
        assert not cached.lookup(request).tables[0].rows.any()
    assert cache.stats()["misses"] == 20
    two = np.arange(2, dtype=np.uint64), np.ones((2, 4), np.float32)
    cache.keep(cache.now(), "", [(0, *two)])
    assert cache.stats()["rows"] == 1
    cached.close()


def test_served_rows_are_not_changed(place: Place) -> None:
    servers = place.connect()
    signs = (TableSigns(0, np.array([1], np.uint64)),)
    for server in (servers[0], CachedServer.before(servers[1], new_cache())):
        with pytest.raises(NotAllowed, match="lookup"):
            server.lookup(LookupRequest(0, True, signs))
        with pytest.raises(NotAllowed, match="update"):
            server.update(UpdateRequest((0, 0), ()))
        with pytest.raises(NotAllowed):
            server.clear_embeddings()
        assert server.ready_for_serving()
        server.close()


def test_without_any_copy_there_is_one_error(place: Place) -> None:
    (server, other) = place.connect()
    other.close()
    place.end(0, "a")
    place.end(0, "b")
    with pytest.raises(ServiceError):
        server.client.call("ready_for_serving", timeout_s=0.2)
    place.begin(0, "b")
    assert server.ready_for_serving()
    server.close()
    with pytest.raises(ServiceError, match="no answer within"):
        CopiedServer.connect_copies(
            place.transport, [f"ipc://{place.folder}/none"], timeout_s=0.1
        )


def test_bounds_of_a_cache_and_addresses_in_the_environment() -> None:
    with pytest.raises(ConfigError, match="row cache"):
        new_cache(ttl_s=0.0)
    with env.changed(PERSIA_SERVING_REPLICAS="a:1|b:1, c:1"):
        assert env.serving_replicas() == [["a:1", "b:1"], ["c:1"]]
    # A range is servers, as in every list of addresses, and not copies of one.
    with env.changed(PERSIA_SERVING_REPLICAS="a-{0..2}:1"):
        assert env.serving_replicas() == [["a-0:1"], ["a-1:1"], ["a-2:1"]]
    with env.changed(PERSIA_SERVING_REPLICAS="a-{0..1}:1|b-{0..1}:1,c:1"):
        assert env.serving_replicas() == [["a-0:1", "b-0:1"], ["a-1:1", "b-1:1"], ["c:1"]]
    for wrong in ("a:1||b:1", "a-{0..2}:1|b-{0..1}:1", "a:1|b-{0..1}:1"):
        with (
            env.changed(PERSIA_SERVING_REPLICAS=wrong),
            pytest.raises(ConfigError, match=r"PERSIA_SERVING_REPLICAS must be .* copies"),
        ):
            env.serving_replicas()
    with env.changed(PERSIA_SERVING_REPLICAS="a:1|b:1"):
        assert RowServers.listed(cache_ttl_ms=1.0) == RowServers([["a:1", "b:1"]], 1.0)
    with (
        env.changed(PERSIA_SERVING_REPLICAS=None),
        pytest.raises(ConfigError, match="PERSIA_SERVING_REPLICAS"),
    ):
        RowServers.listed()


class Versions:
    """A server for inference: of the last version, and of others that are still there."""

    def __init__(self, place: Place, *versions: str) -> None:
        (server, other) = place.connect()
        other.close()
        server.close()
        self.replica_index, self.replica_size = 0, 1
        self.schema_fingerprint = server.schema_fingerprint
        self.versions, self.asked = list(versions), list[tuple[str, int]]()
        self.answers: list[str] = []  # instead, one after the other

    def lookup(self, request: LookupRequest) -> LookupReply:
        wanted = request.version
        version = wanted if wanted in self.versions else self.versions[-1]
        version = self.answers.pop(0) if self.answers else version
        self.asked.append((wanted, sum(len(part.signs) for part in request.tables)))
        return LookupReply(
            tuple(
                TableRows(
                    part.table,
                    np.full((len(part.signs), DIM), float(version), np.float32),
                    None,
                )
                for part in request.tables
            ),
            version,
        )


DIM = SCHEMA.tables[0].dim


@pytest.fixture
def versions(place: Place) -> Iterator[tuple[Versions, RemoteParameterServer, RowCache]]:
    behind = Versions(place, "1")
    address = f"ipc://{place.folder}/versions"
    place.running[address] = serve(place.transport, address, parameter_server(), behind)
    server = RemoteParameterServer.connect(place.transport, address, timeout_s=PATIENCE_S)
    cache = new_cache(clock=lambda: 0.0)
    cached = CachedServer.before(server, cache)
    yield behind, cached, cache
    cached.close()


def asked_for(*signs: int, version: str = "") -> LookupRequest:
    return LookupRequest(0, False, (TableSigns(0, np.array(signs, np.uint64)),), version)


def test_a_reply_is_of_one_version_and_another_one_flushes_the_cache(versions: Any) -> None:
    server, cached, cache = versions

    def ask(*signs: int, version: str = "") -> tuple[str, set[float]]:
        reply = cached.lookup(asked_for(*signs, version=version))
        return reply.version, set(reply.tables[0].rows.ravel().tolist())

    assert ask(1, 2) == ("1", {1.0})
    server.versions.append("2")
    # Wholly from the cache, and of a version that is named too.
    assert ask(1, 2) == ask(1, version="1") == ("1", {1.0})
    assert server.asked == [("", 2)]
    # Another version is not mixed with it, nor kept: no reply said that it is the newest.
    assert ask(1, 3, version="2") == ("2", {2.0})
    assert server.asked.pop() == ("2", 2)
    assert cache.stats()["flushes"] == 0
    # The first reply that says another one: its rows, and all others again.
    assert ask(1, 2, 3) == ("2", {2.0})
    assert server.asked == [("", 2), ("", 1), ("", 3)]
    assert cache.stats()["flushes"] == 1
    assert ask(1, 2, 3) == ("2", {2.0})
    assert ask(1, version="1") == ("1", {1.0})
    assert server.asked[3:] == [("1", 1)]
    # What is named is not kept, or it would hide the newest for ever.
    assert ask(1) == ("2", {2.0})
    assert len(server.asked) == 4


def test_a_reply_from_before_a_flush_is_not_kept(versions: Any) -> None:
    _, cached, cache = versions
    cached.lookup(asked_for(1))
    begun = cache.now()
    cache.flush()
    late = np.array([5], np.uint64), np.ones((1, DIM), np.float32)
    cache.keep(begun, "1", [(0, *late)])
    assert cache.stats()["rows"] == 0
    # Another version in between: whatever comes, a reply has one.
    cached.lookup(asked_for(1))
    versions[0].answers = ["2", "3"]
    reply = cached.lookup(asked_for(1, 2))
    assert (reply.version, set(reply.tables[0].rows.ravel())) == ("3", {3.0})


def test_a_cache_of_one_version_keeps_no_other(versions: Any) -> None:
    server, cached, _ = versions
    cache = new_cache(wanted="1", clock=lambda: 0.0)
    pinned = CachedServer.before(cached, cache)
    server.versions = ["1", "2"]
    for _ in range(2):
        assert pinned.lookup(asked_for(1, version="1")).version == "1"
    assert server.asked == [("1", 1)]
    server.versions = ["2"]
    assert pinned.lookup(asked_for(2, version="1")).version == "2"
    assert pinned.lookup(asked_for(1, version="1")).version == "1"
    assert cache.stats()["rows"] == 1


def test_a_copy_that_has_not_the_version_is_passed_over(place: Place) -> None:
    old, new = Versions(place, "1"), Versions(place, "2")
    addresses = [f"ipc://{place.folder}/{name}" for name in ("old", "new")]
    for address, one in zip(addresses, (old, new), strict=True):
        place.running[address] = serve(place.transport, address, parameter_server(), one)
    settings = RowServers([addresses], **PATIENT)
    dims = [table.dim for table in SCHEMA.tables]
    for wanted in ("1", "2"):

        def connects(wanted: str = wanted) -> RemoteRows | None:
            # The copy that answers first may be the other.
            try:
                return RemoteRows(place.transport, settings, dims, wanted)
            except ServiceBusy:
                return None

        rows = until_made(connects)
        for number in range(40):
            reply = rows.servers[0].lookup(asked_for(number, version=wanted))
            assert reply.version == wanted
        rows.close()
    with pytest.raises(ServiceBusy, match="expected rows of checkpoint 3, got"):
        RemoteRows(place.transport, settings, dims, "3")


def until_made(make: Callable[[], RemoteRows | None]) -> RemoteRows:
    made: list[RemoteRows] = []

    def has_made() -> bool:
        found = make()
        made.extend([found] if found is not None else [])
        return bool(made)

    until(has_made)
    return made[0]


def test_servers_keep_a_version_that_is_asked_for(place: Place, monkeypatch: Monkey) -> None:
    monkeypatch.setattr(remote_rows, "_TOUCH_S", 0.01)
    server = Versions(place, "1")
    address = f"ipc://{place.folder}/idle"
    place.running[address] = serve(place.transport, address, parameter_server(), server)
    dims = [table.dim for table in SCHEMA.tables]
    rows = RemoteRows(place.transport, RowServers([[address]], **PATIENT), dims, "1")
    until(lambda: len(server.asked) >= 3)
    rows.close()
    assert set(server.asked) == {("1", 0)}


class Late:
    """Answers each lookup late; ``behind`` another, not before that has answered one more."""

    def __init__(self, rows: Any, late_s: float) -> None:
        self._rows, self._late_s = rows, late_s
        self.is_over = threading.Event()
        self.behind: Late | None = None
        self.num_lookups = self.num_answered = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rows, name)

    def lookup(self, request: LookupRequest) -> LookupReply:
        self.num_lookups += 1
        self.is_over.wait(self._late_s)
        if (other := self.behind) is not None:
            num_before = other.num_answered
            until(lambda: other.num_answered > num_before or self.is_over.is_set())
        reply: LookupReply = self._rows.lookup(request)
        self.num_answered += 1
        return reply


@contextmanager
def late_copies(place: Place, *late_s: float) -> Iterator[tuple[CopiedServer, list[Late]]]:
    """Copies of a server with all rows, each that late."""
    rows = [Late(place.rows[0], seconds) for seconds in late_s]
    addresses = [f"ipc://{place.folder}/late-{number}" for number in range(len(rows))]
    for address, one in zip(addresses, rows, strict=True):
        place.running[address] = serve(place.transport, address, parameter_server(), one)
    server = CopiedServer.connect_copies(place.transport, addresses, timeout_s=PATIENCE_S)
    until(lambda: server.ready_for_serving() and counts_of(server)["copies_used"] == len(rows))
    try:
        yield server, rows
    finally:
        for one in rows:
            one.is_over.set()
        server.close()


def counts_of(server: CopiedServer) -> Any:
    return server.client.stats()


def signs_of(place: Place) -> LookupRequest:
    signs = np.arange(50, 250, dtype=np.uint64)
    order, starts = route(signs, owners(2), 2)
    return LookupRequest(0, False, (TableSigns(0, signs[order[starts[0] : starts[1]]]),))


def test_a_slow_copy_is_overtaken_and_asked_less(place: Place) -> None:
    request = signs_of(place)
    expected = place.rows[0].lookup(request).tables[0].rows
    num_threads, num_each = 4, 50
    with late_copies(place, 0.3, 0.0) as (server, (slow, fast)):
        slow.behind = fast  # also where the other one gets no processor for a while

        def ask(_: int) -> None:
            for _ in range(num_each):
                found = server.lookup(request).tables[0].rows
                np.testing.assert_array_equal(found, expected)

        with ThreadPoolExecutor(num_threads) as threads:
            list(threads.map(ask, range(num_threads)))
        counts = counts_of(server)
        assert counts["overtaken"] >= 3
        # It is alive, so that it is asked again, and again left out.
        assert slow.num_lookups < num_threads * num_each / 4 < fast.num_lookups


def test_few_lookups_are_asked_twice(place: Place, monkeypatch: Monkey) -> None:
    monkeypatch.setattr(remote_rows, "_FIRST_HEDGE_S", 0.001)
    monkeypatch.setattr(_CopiesClient, "hedge_after_s", lambda _: 0.001)
    with late_copies(place, 0.01, 0.01) as (server, rows):
        before = counts_of(server)["calls"]
        for _ in range(50):
            server.lookup(signs_of(place))
        counts = counts_of(server)
        assert 1 <= counts["hedged"] <= 1 + 0.1 * counts["calls"]
        assert (
            sum(one.num_lookups for one in rows) <= counts["calls"] - before + counts["hedged"]
        )


def test_another_copy_is_asked_after_the_time_of_95_percent(place: Place) -> None:
    with late_copies(place, 0.0, 0.0) as (server, _):
        client: Any = server.client
        (copy, _) = client.copies
        client._took.clear()  # of the calls until both copies were found
        for number in range(400):
            copy.num_calls += 1
            client.end(copy, (number % 100 + 1) / 1000.0, None)
        client._computed_at = -math.inf
        assert client.hedge_after_s() == pytest.approx(0.096, abs=0.002)
