"""Servers in processes of their own that are killed: jobs go on with the same rows."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from persia._cluster.connect import connect_parameter_servers
from persia._rpc.messages import TableSigns
from persia._rpc.stubs import RemoteEmbeddingWorker
from tests.e2e.support import PATIENCE_S, Job, configured_worker, short_directory, transport
from tests.recovery.soak import soak
from tests.support.services import features, gradient

SERVER = "embedding-parameter-server"
LIMIT = "embedding_parameter_server_config: {memory_limit: 16MiB}"


@pytest.fixture
def job(directory: Path) -> Iterator[Job]:
    with short_directory() as sockets:
        made = Job(sockets)
        config = made.script("global.yml", LIMIT)
        made.environment |= {
            "PERSIA_STATE_DIRECTORY": str(directory),
            "PERSIA_GLOBAL_CONFIG": config,
        }
        yield made
        made.close()


@pytest.fixture
def worker(job: Job) -> Iterator[RemoteEmbeddingWorker]:
    with configured_worker(job) as made:
        yield made


def values(job: Job) -> bytes:
    """All rows of the server, sorted by sign."""
    signs = np.arange(5, dtype=np.uint64) | np.uint64(1 << 56)
    with transport() as made:
        (server,) = connect_parameter_servers(
            made,
            addresses=job.addresses["PERSIA_EMBEDDING_PARAMETER_SERVERS"].split(","),
            timeout_s=PATIENCE_S,
        )
        (entries,) = server.read_embedding((TableSigns(0, signs),))
        server.close()
    assert len(entries.signs) == 4
    return entries.values.tobytes()


@pytest.mark.slow
def test_updates_are_applied_once_whenever_a_server_is_killed() -> None:
    assert "every row is as often stepped as it was acknowledged" in soak(10, 3)


def kill(job: Job, number: int) -> None:
    server = job.processes[number]
    server.signal(signal.SIGKILL)
    server.wait()


def test_w17_a_killed_server_has_its_rows_again_and_training_goes_on(
    job: Job, worker: RemoteEmbeddingWorker, directory: Path
) -> None:
    batch = features({"feature": [[1, 2, 3], [4]]}, 1)
    result = worker.lookup(worker.register(batch), True)
    assert worker.update(gradient(result, (1, 1))).num_missing == 0
    before = values(job)
    result = worker.lookup(worker.register(batch), True)
    kill(job, 0)
    job.start_server(SERVER)
    assert values(job) == before
    # Looked up before, updated afterwards: no row is missing.
    assert worker.update(gradient(result, (1, 2))).num_missing == 0
    assert values(job) != before
    printed = job.processes[1].printed()
    assert "was restarted and has its 4 rows again" in printed
    assert "ARE LOST" not in printed
    server = job.processes[2]
    server.signal(signal.SIGTERM)
    assert server.wait() == 128 + signal.SIGTERM
    assert list(directory.iterdir()) == []
