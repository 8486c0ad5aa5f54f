"""Servers and stores that are killed: rows are there again, and each update counts once."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from persia import env
from persia._rpc.messages import TableSigns
from persia._rpc.stubs import RemoteEmbeddingWorker
from tests.e2e.support import Job, configured_worker, running_job
from tests.faults.batches import SLOTS
from tests.faults.job import LOADER, assert_each_once, make_ctx, train
from tests.recovery.soak import connected, soak
from tests.support.processes import DEADLINE_S, ROOT, Cluster, run
from tests.support.services import features, gradient
from tests.support.tmpfs import tmpfs_directory

SERVER = "embedding-parameter-server"
COUNT = 120
SETTINGS = {"embedding_parameter_server_config": {"memory_limit": "16MiB"}}


@pytest.fixture
def directory() -> Iterator[Path]:
    with tmpfs_directory() as made:
        yield made


@pytest.fixture
def job(directory: Path) -> Iterator[Job]:
    with running_job(settings=SETTINGS, PERSIA_STATE_DIRECTORY=str(directory)) as made:
        yield made


@pytest.fixture
def worker(job: Job) -> Iterator[RemoteEmbeddingWorker]:
    with configured_worker(job) as made:
        yield made


def values(job: Job) -> bytes:
    """All rows of the server, sorted by sign."""
    signs = np.arange(5, dtype=np.uint64) | np.uint64(1 << 56)
    with connected(job.addresses[SERVER]) as (server,):
        (entries,) = server.read_embedding((TableSigns(0, signs),))
    assert len(entries.signs) == 4
    return entries.values.tobytes()


@pytest.mark.slow
def test_updates_are_applied_once_whenever_a_server_is_killed() -> None:
    assert "every row is as often stepped as it was acknowledged" in soak(10, 3)


def test_w17_a_killed_server_has_its_rows_again_and_training_goes_on(
    job: Job, worker: RemoteEmbeddingWorker, directory: Path
) -> None:
    batch = features({"feature": [[1, 2, 3], [4]]}, 1)
    result = worker.lookup(worker.register(batch), True)
    assert worker.update(gradient(result, (1, 1))).num_missing == 0
    before = values(job)
    result = worker.lookup(worker.register(batch), True)
    job.processes[0].send_signal(signal.SIGKILL)
    job.processes[0].wait()
    job.start_server(SERVER)
    assert values(job) == before
    # Looked up before, updated afterwards: no row is missing.
    assert worker.update(gradient(result, (1, 2))).num_missing == 0
    assert values(job) != before
    printed = job.processes[1].printed()
    assert "was restarted and has its 4 rows again" in printed
    assert "ARE LOST" not in printed
    server = job.processes[2]
    server.send_signal(signal.SIGTERM)
    assert server.wait() == 128 + signal.SIGTERM
    assert list(directory.iterdir()) == []


# --- training over killed servers -----------------------------------------------------------


@pytest.mark.slow
def test_w17_w30_killed_servers_have_their_rows_again(
    directory: Path,
) -> None:
    keep = {"PERSIA_STATE_DIRECTORY": str(directory)}
    with Cluster(SLOTS, SETTINGS, num_servers=2, num_workers=2, environment=keep) as cluster:
        cluster.start_servers()
        os.environ.update(cluster.variables)

        def disturb() -> None:
            for number in range(2):
                cluster.kill(f"embedding-parameter-server-{number}")
                cluster.start_server(number)

        cluster.start_loaders(LOADER, 1, str(COUNT))
        with make_ctx() as ctx:
            assert_each_once(ctx, train(ctx, 20, disturb), COUNT)
        log = cluster.log("embedding-worker-0") + cluster.log("embedding-worker-1")
    assert "rows again; training goes on" in log
    assert "ARE LOST" not in log


# --- a store that ends anywhere -------------------------------------------------------------


@pytest.mark.parametrize(
    ("stride", "least"), [(61, 20), pytest.param(1, 1000, marks=pytest.mark.slow)]
)
def test_requests_cut_short_and_repeated_give_the_same_rows(
    directory: Path, stride: int, least: int
) -> None:
    """Processes end at every ``stride``-th point."""
    words = ("-m", "tests.recovery.crash_points", directory, stride)
    variables = env.of_child(OPENBLAS_NUM_THREADS=1, PYTHONPATH=ROOT)
    done = run(*words, env=variables, timeout_s=DEADLINE_S)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[0]) > least
