"""Processes that die, stop and come back in the middle of training.

In each case training goes on once the process is back, or ends in time with an error that names
it. Rows tell whether every batch was trained, and once.
"""

from __future__ import annotations

import ast
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from persia.data import DataLoader, StreamingDataset
from persia.errors import ServiceError, ServiceTimeout
from tests.faults.batches import SLOTS, occurrences
from tests.faults.job import LOADER, assert_each_once, make_ctx, train, train_each_once, trained
from tests.support.processes import Cluster
from tests.support.waiting import until

COUNT = 120


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with Cluster(SLOTS, num_servers=2, num_workers=2) as made:
        made.start_servers()
        os.environ.update(made.variables)
        yield made


EITHER_ORDER = pytest.mark.parametrize(
    "in_order", [pytest.param(False, marks=pytest.mark.slow), True]
)


def restart(cluster: Cluster, role: str) -> None:
    """Kill the last process of a role and start it again."""
    if role == "data-loader":
        cluster.kill("data-loader-0")
        cluster.start_loaders(LOADER, 1, str(COUNT))
        return
    cluster.kill(f"{role}-1")
    cluster.start_replica(role, 1)


@EITHER_ORDER
@pytest.mark.parametrize("loaders", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_w13_without_faults_each_batch_is_trained_once(
    cluster: Cluster, in_order: bool, loaders: int
) -> None:
    cluster.start_loaders(LOADER, loaders, str(COUNT))
    train_each_once(COUNT, in_order=in_order)


@EITHER_ORDER
@pytest.mark.parametrize("role", ["data-loader", "embedding-worker"])
def test_w10_a_process_is_killed_and_started_again(
    cluster: Cluster, in_order: bool, role: str
) -> None:
    cluster.start_loaders(LOADER, 1, str(COUNT))
    train_each_once(COUNT, 20, lambda: restart(cluster, role), in_order)


@EITHER_ORDER
def test_a_data_loader_that_was_killed_goes_on_in_its_epoch(
    cluster: Cluster, in_order: bool
) -> None:
    def disturb() -> None:
        cluster.kill("data-loader-0")
        cluster.start_loaders(LOADER, 1, str(COUNT), *ends)

    ends = ("--ends", "40", "85")
    cluster.start_loaders(LOADER, 1, str(COUNT), *ends)
    with make_ctx() as ctx:
        seen = []
        for first, end in ((0, 40), (40, 85), (85, COUNT)):
            of_epoch = train(ctx, 20 if first == 40 else -1, disturb, in_order=in_order)
            assert sorted(of_epoch) == list(range(first, end))
            assert sum(ctx.get_embedding_size()) > 0  # between two loops the servers answer
            seen += of_epoch
        assert_each_once(ctx, seen, COUNT)


@pytest.mark.slow
@pytest.mark.parametrize("in_order", [False, True])
@pytest.mark.parametrize("is_back_first", [False, True])
def test_w10_a_data_loader_that_has_ended_is_killed_together_with_embedding_workers(
    cluster: Cluster, in_order: bool, is_back_first: bool
) -> None:
    """Its last batches are under way: only it can register their ids again."""

    def disturb() -> None:
        stream = ctx._connected().connection.stream
        assert stream is not None
        receiver = stream.receiver
        until(lambda: receiver._streams.order.streams[0].ended_at == COUNT)
        cluster.kill("data-loader-0")
        if is_back_first:
            cluster.start_loaders(LOADER, 1, str(COUNT))
        for number in range(2):
            cluster.kill(f"embedding-worker-{number}")
            cluster.start_replica("embedding-worker", number)
        if not is_back_first:
            cluster.start_loaders(LOADER, 1, str(COUNT))

    cluster.start_loaders(LOADER, 1, str(COUNT))
    with make_ctx() as ctx:
        seen = train(ctx, COUNT - 4, disturb, in_order=in_order)
        assert_each_once(ctx, seen, COUNT)
    # Its launcher would wait for the end of the job.
    until(lambda: "}\n" in cluster.log("data-loader-0"), details=cluster.logs)
    (books,) = re.findall(r"^{.*}$", cluster.log("data-loader-0"), re.MULTILINE)
    counts = ast.literal_eval(books)
    # Each has been received from the one before; what was wanted it has registered again.
    assert counts["registered_again"] >= 4
    assert counts.get("dropped", 0) + counts["registered_again"] >= COUNT
    assert set(counts) <= {"dropped", "registered_again", "skipped"}


@pytest.mark.slow
def test_w17_w30_a_server_is_killed_and_started_anew(cluster: Cluster) -> None:
    cluster.start_loaders(LOADER, 1, str(COUNT))
    with make_ctx() as ctx:
        seen = train(ctx, 20, lambda: restart(cluster, "embedding-parameter-server"))
        assert sorted(seen) == list(range(COUNT))
        expected, got = occurrences(COUNT), trained(ctx)
        for name in expected:  # what it held is lost, the rest is exact
            assert (got[name] <= expected[name]).all()
            assert (got[name] == expected[name]).any()
        assert ctx.stats()["failed"] == 0
    log = cluster.log("embedding-worker-0") + cluster.log("embedding-worker-1")
    assert "ERROR" in log
    assert "embedding-parameter-server 1" in log
    assert "ARE LOST" in log


@pytest.mark.slow
@pytest.mark.parametrize(
    ("names", "error", "match", "timeout_ms", "rpc_s"),
    [
        ("data-loader-0", ServiceTimeout, "data-loader 0 of 1", 5000, "300"),
        ("embedding-worker-0 embedding-worker-1", ServiceError, "-worker [01]", 60_000, "6"),
    ],
)
def test_a_process_that_stays_away_is_named(
    cluster: Cluster,
    monkeypatch: pytest.MonkeyPatch,
    names: str,
    error: type[ServiceError],
    match: str,
    timeout_ms: int,
    rpc_s: str,
) -> None:
    def disturb() -> None:
        for name in names.split():
            cluster.kill(name)

    # A busy machine takes seconds to start them.
    servers = list(cluster.processes)
    until(lambda: all("serves at" in cluster.log(one) for one in servers), details=cluster.logs)
    monkeypatch.setenv("PERSIA_RPC_TIMEOUT", rpc_s)  # of the data-loader too
    cluster.start_loaders(LOADER, 1, str(COUNT))
    with pytest.raises(error, match=match), make_ctx() as ctx:
        train(ctx, 20, disturb, timeout_ms=timeout_ms)


@pytest.mark.slow
@pytest.mark.parametrize("role", ["embedding-parameter-server-1", "embedding-worker-0"])
def test_a_process_stands_still_for_half_a_minute(cluster: Cluster, role: str) -> None:
    process = cluster.processes[role]
    goes_on = threading.Timer(30.0, process.send_signal, [signal.SIGCONT])

    def disturb() -> None:
        process.send_signal(signal.SIGSTOP)
        goes_on.start()

    cluster.start_loaders(LOADER, 1, str(COUNT))
    train_each_once(COUNT, 20, disturb)
    goes_on.join()


@pytest.mark.slow
def test_a_loop_is_left_in_seconds_where_nobody_answers(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its batches are to be released, one by one; a launcher that was stopped waits 2.5 s."""
    monkeypatch.setenv("PERSIA_RPC_TIMEOUT", "200")
    cluster.start_loaders(LOADER, 1, str(COUNT))
    with make_ctx() as ctx:
        batches: Any = iter(DataLoader(StreamingDataset(6), embedding_staleness=8))
        ctx.forward(next(batches))
        cluster.kill("embedding-worker-0")
        cluster.kill("embedding-worker-1")
        begun_at = time.monotonic()
        batches.close()
        assert time.monotonic() - begun_at < 60.0  # it takes 2 s on a machine with time
