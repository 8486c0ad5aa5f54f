"""Servers that are killed, replaced, or stand still, in processes of their own."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from persia._rpc.stubs import RemoteEmbeddingWorker
from tests.e2e.support import SERVERS, Job, configured_worker
from tests.support.services import features, gradient
from tests.support.waiting import until


@pytest.fixture
def worker(job: Job) -> Iterator[RemoteEmbeddingWorker]:
    """The worker of a job whose servers have settings."""
    with configured_worker(job) as made:
        yield made


def step(worker: RemoteEmbeddingWorker, number: int) -> int:
    """Train one batch; returns the number of rows that were gone."""
    batch = features({"feature": [[1, 2, 3], [4]]}, number)
    result = worker.lookup(worker.register(batch), True)
    return worker.update(gradient(result, (1, number))).num_missing


def test_w17_w30_a_killed_server_comes_back(job: Job, worker: RemoteEmbeddingWorker) -> None:
    assert step(worker, 1) == 0
    assert worker.get_embedding_size() == [4]
    server, worker_process = job.processes
    server.send_signal(signal.SIGKILL)
    server.wait()
    job.start_server(SERVERS[0])
    assert step(worker, 2) == 0
    assert worker.get_embedding_size() == [4]
    assert worker.stats()["server_restarts"] == 1
    assert worker_process.printed().count("THE ROWS IT HELD ARE LOST") == 1


def states_of(pid: int) -> list[str]:
    """Return the states of a process's threads, as the kernel names them."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [(task / "stat").read_text().rpartition(")")[2].split()[0] for task in tasks]


def test_w53_a_server_that_stands_still(job: Job, worker: RemoteEmbeddingWorker) -> None:
    assert step(worker, 1) == 0
    server = job.processes[0]
    server.send_signal(signal.SIGSTOP)
    until(lambda: set(states_of(server.pid)) == {"T"})  # threads stop one by one
    ref = worker.register(features({"feature": [[1, 2]]}, 2))
    with pytest.raises(TimeoutError, match=r"embedding-.* 0 at ipc://.* within"):
        worker.client.call("lookup", ref, True, timeout_s=1.0)
    server.send_signal(signal.SIGCONT)
    result = worker.lookup(ref, True)
    assert worker.update(gradient(result, (1, 2))).num_missing == 0
    assert "server_restarts" not in worker.stats()
