"""Kernels of users in server processes: found, refused, and crashed."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from persia import env
from persia._core.kernels import native
from persia._rpc.messages import InitializationSettings, OptimizerSettings
from persia.cpp_extension import get_kernels_name
from persia.data import DataLoader, StreamingDataset
from persia.embedding import NativeInitialValues
from persia.embedding.optim import Adagrad, Native, Optimizer
from persia.errors import ExtensionError, PersiaError
from tests.e2e.support import configured_worker, new_job
from tests.faults.batches import DIM, SLOTS
from tests.faults.job import LOADER, assert_each_once, make_ctx, step, train, trained
from tests.support import kernels
from tests.support.places import tmpfs_directory
from tests.support.processes import Cluster
from tests.support.services import SETTINGS, SGD
from tests.support.waiting import until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler"),
]

COUNT = 120
SERVER = "embedding-parameter-server"


@contextmanager
def job(roots: Path, slots: Mapping[str, Any] = SLOTS, **variables: str) -> Iterator[Cluster]:
    """Two servers and two workers of a job, whose trainer is this process."""
    with ExitStack() as stack:
        names = {"PERSIA_KERNEL_ROOTS": str(roots), **variables}
        cluster = stack.enter_context(
            Cluster(slots, num_servers=2, num_workers=2, environment=names)
        )
        stack.enter_context(env.changed(**cluster.variables))
        cluster.start_servers()
        yield cluster


def start_again(cluster: Cluster) -> str:
    """Wait for the server that ends, start it again; returns what it had printed."""
    servers = [cluster.processes[f"{SERVER}-{number}"] for number in range(2)]
    until(lambda: any(one.poll() is not None for one in servers), details=cluster.logs)
    (number,) = [n for n, one in enumerate(servers) if one.poll() is not None]
    printed = cluster.log(f"{SERVER}-{number}")
    cluster.start_replica(SERVER, number)
    return printed


def test_a_kernel_that_crashes_is_named_and_costs_no_row(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    library = kernels.library("crashes_once", f'-DMARKER="{marker}"')
    shutil.copy(library, tmp_path)
    found: list[Future[str]] = []
    with (
        tmpfs_directory() as states,
        job(tmp_path, PERSIA_STATE_DIRECTORY=str(states)) as cluster,
        ThreadPoolExecutor(1) as threads,
    ):

        def disturb() -> None:
            marker.touch()
            found.append(threads.submit(start_again, cluster))

        cluster.start_loaders(LOADER, 1, str(COUNT))
        with make_ctx(optimizer=Native(library, lr=1.0)) as ctx:
            assert_each_once(ctx, train(ctx, 20, disturb), COUNT)
        log = cluster.log("embedding-worker-0") + cluster.log("embedding-worker-1")
    (printed,) = (one.result() for one in found)
    assert "persia: kernel crashes_once (sha256 " in printed
    assert "crashed with SIGSEGV; this process ends" in printed
    assert "rows again; training goes on" in log
    assert "ARE LOST" not in log


def rows_after(optimizer: Optimizer, roots: Path, disturbed_at: int) -> dict[str, bytes]:
    """Train in order, over servers that are killed; returns the first value of each id."""
    with (
        tmpfs_directory() as states,
        job(roots, PERSIA_STATE_DIRECTORY=str(states)) as cluster,
        make_ctx(optimizer=optimizer) as ctx,
    ):
        cluster.start_loaders(LOADER, 1, str(COUNT))
        loader = DataLoader(StreamingDataset(6), reproducible=True, embedding_staleness=1)
        for place, batch in enumerate(loader):
            if place == disturbed_at:
                for number in range(2):
                    cluster.kill(f"{SERVER}-{number}")
                    cluster.start_replica(SERVER, number)
            assert step(ctx, batch) == place
        log = cluster.log("embedding-worker-0") + cluster.log("embedding-worker-1")
        assert ("rows again; training goes on" in log) == (disturbed_at >= 0)
        return {name: values.tobytes() for name, values in trained(ctx).items()}


def test_adagrad_in_c_over_killed_servers_gives_the_bytes_of_the_built_in(
    tmp_path: Path,
) -> None:
    library = kernels.library("adagrad")
    shutil.copy(library, tmp_path)
    wanted = rows_after(Adagrad(lr=0.1), tmp_path, -1)
    assert rows_after(Native(library, lr=0.1), tmp_path, 40) == wanted
    assert all(np.frombuffer(values, np.float32).any() for values in wanted.values())


def test_servers_load_kernels_from_their_roots_alone(tmp_path: Path) -> None:
    roots = tmp_path / "roots"
    roots.mkdir()
    optimizer = Native(kernels.library("crashes_once", '-DMARKER="/no/file"'), lr=1.0)
    # Too small to be seen in a row that was stepped.
    initial = NativeInitialValues(
        kernels.library("initial"), params={"lower": 0.0, "upper": 1e-30}
    )
    scorer = kernels.library("scorer")
    eviction = {"policy": get_kernels_name(scorer)}
    slots = {**SLOTS, "group_settings": {"user": {"eviction": eviction}}}
    with job(roots, slots) as cluster:
        cluster.start_loaders(LOADER, 1, str(COUNT))
        for missing in (initial.library, scorer, optimizer.library):
            with (
                pytest.raises(ExtensionError, match=rf"expected {missing.name} with sha256"),
                make_ctx(slots, optimizer, initial),
            ):
                pass
            shutil.copy(missing, roots)
        with make_ctx(slots, optimizer, initial) as ctx:
            assert_each_once(ctx, train(ctx), COUNT)
        servers = [cluster.processes[f"{SERVER}-{number}"] for number in range(2)]
        assert [one.poll() for one in servers] == [None, None]


def test_ids_are_hashed_by_a_library_that_embedding_workers_load(tmp_path: Path) -> None:
    library = kernels.library("hash", "-DSHIFT=0", "-DFAILS_AT=1000")
    shutil.copy(library, tmp_path)
    hashed = {"dim": DIM, "id_hash": get_kernels_name(library)}
    slots = {"slots_config": dict.fromkeys(SLOTS["slots_config"], hashed)}
    with job(tmp_path, slots) as cluster:
        cluster.start_loaders(LOADER, 1, str(COUNT))
        with pytest.raises(PersiaError, match=r"slots_config\.\w+\.id_hash is .*native:hash:"):
            make_ctx().__enter__()
        with make_ctx(slots) as ctx:
            assert_each_once(ctx, train(ctx), COUNT)


def test_libraries_that_are_refused_leave_the_server_alive(tmp_path: Path) -> None:
    """One of a newer interface, as of a trainer that is ahead, and one that crashes at once."""
    refused = {
        f"interface version {native.VERSION + 1}, this PERSIA has {native.VERSION}": (
            f"-DVERSION={native.VERSION + 1}"
        ),
        "crashed with signal 6 when tried out": "-DCRASH=1",
        "it writes beside the row or its state": "-DEXTRA=1",
    }
    with (
        new_job(PERSIA_KERNEL_ROOTS=str(tmp_path)) as made,
        configured_worker(made) as worker,
    ):
        for message, flag in refused.items():
            path = kernels.library("faulty", flag)
            shutil.copy(path, tmp_path)
            name = f"native:faulty:{hashlib.sha256(path.read_bytes()).hexdigest()}"
            with pytest.raises(ExtensionError, match=message):
                worker.register_optimizer(OptimizerSettings(name, {"lr": 0.1}))
        path = kernels.library("initial", "-DBESIDE=1")
        shutil.copy(path, tmp_path)
        name = f"native:initial:{hashlib.sha256(path.read_bytes()).hexdigest()}"
        with pytest.raises(ExtensionError, match="fill writes beside the row"):
            worker.configure(replace(SETTINGS, initialization=InitializationSettings(name)))
        worker.configure(SETTINGS)
        worker.register_optimizer(SGD)
        assert worker.get_embedding_size() == [0]
        assert all(one.poll() is None for one in made.processes.values())
