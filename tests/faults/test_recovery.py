"""Servers and stores that are killed: rows are there again, and each update counts once."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from persia import env
from tests.faults.batches import SLOTS
from tests.faults.job import LOADER, train_each_once
from tests.recovery.soak import soak
from tests.support.places import tmpfs_directory
from tests.support.processes import DEADLINE_S, ROOT, Cluster, run

COUNT = 120
SETTINGS = {"embedding_parameter_server_config": {"memory_limit": "16MiB"}}


@pytest.fixture
def directory() -> Iterator[Path]:
    with tmpfs_directory() as made:
        yield made


@pytest.mark.slow
def test_updates_are_applied_once_whenever_a_server_is_killed() -> None:
    assert "every row is as often stepped as it was acknowledged" in soak(10, 3)


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
                cluster.start_replica("embedding-parameter-server", number)

        cluster.start_loaders(LOADER, 1, str(COUNT))
        train_each_once(COUNT, 20, disturb)
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
