"""Lists of addresses: of servers elsewhere, and where a server of this process listens."""

from __future__ import annotations

import logging
import threading
from typing import Any

import pytest

from persia import env
from persia._cluster import connect
from persia._cluster.connect import listening_address
from persia.errors import ConfigError
from tests.cluster.place import Monkey, Place
from tests.support.fixtures import Log


def test_the_old_name_of_the_embedding_workers_counts(monkeypatch: Monkey) -> None:
    monkeypatch.setenv("EMBEDDING_WORKER_SERVICE", "old:1")
    assert env.embedding_worker_addresses() == ["old:1"]
    monkeypatch.setenv("PERSIA_EMBEDDING_WORKERS", "new:1, new:2")
    assert env.embedding_worker_addresses() == ["new:1", "new:2"]
    for text in ("a:1,,b:2", "a:1,", " "):
        monkeypatch.setenv("PERSIA_NN_WORKERS", text)
        with pytest.raises(ConfigError, match="PERSIA_NN_WORKERS must be a list of addresses"):
            env.nn_worker_addresses()


@pytest.mark.parametrize(
    "address", ["here", "here:", ":1", "http://here:1", "a:65536", "ipc://"]
)
def test_an_address_that_cannot_be_read_is_named(place: Place, address: str) -> None:
    with pytest.raises(
        ConfigError, match=r"the list of embedding-parameter-servers given: .*address"
    ):
        place.find(address)


def test_a_range_among_the_addresses_given_is_expanded(monkeypatch: Monkey) -> None:
    listed = connect._list_of("nn-worker", ["node-{0..2}.job:5", "other:6"]).addresses
    assert listed == [
        f"tcp://{at}" for at in ("node-0.job:5", "node-1.job:5", "node-2.job:5", "other:6")
    ]
    monkeypatch.setenv("PERSIA_EMBEDDING_WORKERS", "w-{0..3}.job:8887")
    assert listening_address("embedding-worker", 3) == "tcp://127.0.0.1:8887"
    with pytest.raises(ConfigError, match="the list of nn-workers given: expected a range"):
        connect._list_of("nn-worker", ["node-{2..0}:5"])


def test_an_option_that_is_none_is_refused() -> None:
    transport: Any = None
    with pytest.raises(TypeError, match="shuld_stop"):
        connect.connect_parameter_servers(transport, shuld_stop=bool)  # type: ignore[call-arg]


def test_where_a_server_listens(monkeypatch: Monkey) -> None:
    cases: list[tuple[str, int, Any, str]] = [
        ("a:1", 2, {}, "tcp://127.0.0.1:1"),
        ("a:1,b:2", 1, {}, "tcp://127.0.0.1:2"),
        ("a:1,ipc:///tmp/x", 1, {}, "ipc:///tmp/x"),
        ("a:1,ipc:///tmp/x", 1, {"port": 7}, "tcp://127.0.0.1:7"),
        ("a:1", 0, {"host": "::1"}, "tcp://[::1]:1"),
    ]
    for listed, index, options, want in cases:
        monkeypatch.setenv("PERSIA_EMBEDDING_WORKERS", listed)
        assert listening_address("embedding-worker", index, **options) == want
    monkeypatch.setenv("PERSIA_EMBEDDING_WORKERS", "a:1,b:1")
    with pytest.raises(ConfigError, match="expected an address for embedding-worker 2, got 2"):
        listening_address("embedding-worker", 2)


@pytest.mark.parametrize(
    ("listed", "rank", "want"),
    [
        ("a:10", 3, "tcp://127.0.0.1:11"),  # one name of all nodes: the local rank counts
        ("a:10,b:20", 2, "tcp://127.0.0.1:20"),
        ("a:10,b:20", 3, "tcp://127.0.0.1:21"),
        ("a:1,b:2,c:3,d:4", 3, "tcp://127.0.0.1:4"),
        ("a:1,b:1,c:1", 3, "each of 4 ranks, or for each of the nodes"),
        ("ipc:///tmp/a", 3, "each rank where they are ipc"),
    ],
)
@pytest.mark.usefixtures("no_job")
def test_where_a_rank_listens(monkeypatch: Monkey, listed: str, rank: int, want: str) -> None:
    monkeypatch.setenv("PERSIA_NN_WORKERS", listed)
    env.set_env(world_size=4, rank=rank, local_rank=rank % 2)
    if want.startswith("tcp://"):
        assert listening_address("nn-worker", rank) == want
        return
    with pytest.raises(ConfigError, match=want):
        listening_address("nn-worker", rank)


def test_nats_is_ignored_with_one_line(place: Place, monkeypatch: Monkey, caplog: Log) -> None:
    monkeypatch.setattr(connect, "_nats_warning", threading.Lock())
    monkeypatch.setenv("PERSIA_NATS_URL", "nats://nowhere:4222")
    place.serve(0, 1)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert place.find(place.ipc(0)) == [0]
    assert [record.message for record in caplog.records] == [
        "PERSIA_NATS_URL is ignored: servers are found by their addresses"
    ]


@pytest.mark.parametrize(
    ("role", "variable", "port"),
    [
        ("embedding-parameter-server", "PERSIA_EMBEDDING_PARAMETER_SERVERS", 8888),
        ("embedding-worker", "PERSIA_EMBEDDING_WORKERS", 8887),
        ("nn-worker", "PERSIA_NN_WORKERS", 23457),
    ],
)
def test_w71_only_this_machine_is_listened_to_unless_told_otherwise(
    role: str, variable: str, port: int, monkeypatch: Monkey
) -> None:
    assert listening_address(role, 0) == f"tcp://127.0.0.1:{port}"
    # How others get here is not where to listen.
    monkeypatch.setenv(variable, "far.example:4000")
    assert listening_address(role, 0) == "tcp://127.0.0.1:4000"
    assert listening_address(role, 0, host="10.0.0.1") == "tcp://10.0.0.1:4000"
    monkeypatch.setenv("PERSIA_LISTEN_HOST", "0.0.0.0")
    assert listening_address(role, 0) == "tcp://0.0.0.0:4000"
