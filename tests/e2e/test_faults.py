"""Servers that are killed, replaced, or stand still, in processes of their own."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from persia._rpc.stubs import RemoteEmbeddingWorker
from tests.e2e.support import Job, configured_worker, new_job
from tests.support.places import tmpfs_directory
from tests.support.processes import SERVERS
from tests.support.services import features, gradient
from tests.support.waiting import until

SERVER, WORKER = (f"{role}-0" for role in SERVERS)


@pytest.fixture
def worker(job: Job) -> Iterator[RemoteEmbeddingWorker]:
    """The worker of a job whose servers have settings."""
    with configured_worker(job) as made:
        yield made


def lookup(worker: RemoteEmbeddingWorker, number: int) -> Any:
    batch = features({"feature": [[1, 2, 3], [4]]}, number)
    return worker.lookup(worker.register(batch), True)


def step(worker: RemoteEmbeddingWorker, number: int) -> int:
    """Train one batch; returns the number of rows that were gone."""
    return worker.update(gradient(lookup(worker, number), (1, number))).num_missing


def test_w17_w30_a_killed_server_comes_back(job: Job, worker: RemoteEmbeddingWorker) -> None:
    assert step(worker, 1) == 0
    assert worker.get_embedding_size() == [4]
    job.kill(SERVER)
    job.start_replica(SERVERS[0])
    assert step(worker, 2) == 0
    assert worker.get_embedding_size() == [4]
    assert worker.stats()["server_restarts"] == 1
    assert job.log(WORKER).count("THE ROWS IT HELD ARE LOST") == 1


def values(worker: RemoteEmbeddingWorker) -> bytes:
    """The rows of all ids."""
    batch = features({"feature": [[1], [2], [3], [4], [5]]}, requires_grad=False)
    (output,) = worker.lookup_direct(batch).outputs
    return output.values.tobytes()  # type: ignore[union-attr]


def test_w17_a_killed_server_has_its_rows_again_and_training_goes_on() -> None:
    settings = {"embedding_parameter_server_config": {"memory_limit": "16MiB"}}
    with (
        tmpfs_directory() as directory,
        new_job(settings, PERSIA_STATE_DIRECTORY=str(directory)) as job,
        configured_worker(job) as worker,
    ):
        assert step(worker, 1) == 0
        before = values(worker)
        result = lookup(worker, 1)
        job.kill(SERVER)
        server = job.start_replica(SERVERS[0])
        assert values(worker) == before
        # Looked up before, updated afterwards: no row is missing.
        assert worker.update(gradient(result, (1, 2))).num_missing == 0
        assert values(worker) != before
        assert worker.get_embedding_size() == [4]
        assert "was restarted and has its 4 rows again" in job.log(WORKER)
        assert "ARE LOST" not in job.log(WORKER)
        server.send_signal(signal.SIGTERM)
        assert server.wait() == 128 + signal.SIGTERM
        assert list(directory.iterdir()) == []


def states_of(pid: int) -> list[str]:
    """Return the states of a process's threads, as the kernel names them."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [(task / "stat").read_text().rpartition(")")[2].split()[0] for task in tasks]


def test_w53_a_server_that_stands_still(job: Job, worker: RemoteEmbeddingWorker) -> None:
    assert step(worker, 1) == 0
    server = job.processes[SERVER]
    server.send_signal(signal.SIGSTOP)
    until(lambda: set(states_of(server.pid)) == {"T"})  # threads stop one by one
    ref = worker.register(features({"feature": [[1, 2]]}, 2))
    with pytest.raises(TimeoutError, match=r"embedding-.* 0 at ipc://.* within"):
        worker.client.call("lookup", ref, True, timeout_s=1.0)
    server.send_signal(signal.SIGCONT)
    result = worker.lookup(ref, True)
    assert worker.update(gradient(result, (1, 2))).num_missing == 0
    assert "server_restarts" not in worker.stats()
