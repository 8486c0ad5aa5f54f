"""Servers and stores that are killed: rows are there again, and each update counts once."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from persia import env
from persia._files import catalog
from persia._files.log_position import LogPosition
from persia._files.manifest import number_of
from persia._files.storage import LocalStorage
from tests.faults.batches import SLOTS
from tests.faults.job import LOADER, assert_each_once, make_ctx, train, train_each_once
from tests.recovery.soak import soak
from tests.support.places import tmpfs_directory
from tests.support.processes import DEADLINE_S, ROOT, Cluster, run
from tests.support.waiting import until

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


@pytest.mark.slow
def test_a_server_whose_memory_is_gone_begins_with_its_newest_packets(tmp_path: Path) -> None:
    """No state file outlives it, as on a machine that is lost."""
    writes = {
        "enable_incremental_update": True,
        "incremental_flush_sec": 0.5,
        "incremental_dir": str(tmp_path / "log"),
        "recovery": True,
    }
    settings = {"embedding_parameter_server_config": writes}
    names = {"PERSIA_RUN_ID": "faults"}
    server = "embedding-parameter-server-1"
    with Cluster(SLOTS, settings, num_servers=2, num_workers=2, environment=names) as cluster:
        cluster.start_servers()
        os.environ.update(cluster.variables)
        cluster.start_loaders(LOADER, 1, str(COUNT))

        def disturb() -> None:
            # From the packet that a checkpoint names on, all rows of now are there.
            ctx.dump_checkpoint(tmp_path / "ckpt")
            saved = catalog.load(LocalStorage(tmp_path / "ckpt"))
            promised = LogPosition.of(saved).packets[1]
            log = LocalStorage(tmp_path / "log" / "s1")
            until(lambda: number_of(catalog.latest(log) or "0-")[0] >= promised)
            cluster.kill(server)
            cluster.start_replica("embedding-parameter-server", 1)

        with make_ctx() as ctx:
            seen = train(ctx, 40, disturb)
            assert_each_once(ctx, seen, COUNT)
        found = cluster.log("embedding-worker-0") + cluster.log("embedding-worker-1")
        assert "is empty, and begins with its rows as of" in cluster.log(server)
    assert "rows again; training goes on" in found
    assert "ARE LOST" not in found


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
