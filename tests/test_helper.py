"""PersiaServiceCtx: a whole job in one ``with``, and nothing left of it afterwards."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import persia.helper
from persia import env
from persia._cluster.connect import connect_embedding_workers
from persia.errors import ConfigError, RemoteError, ServiceTimeout
from persia.helper import PersiaServiceCtx, ensure_persia_service
from tests.e2e.support import processes_with, transport, wait_until_gone
from tests.meta.sources import ROOT
from tests.support.fixtures import Monkey
from tests.support.places import short_directory
from tests.support.waiting import PATIENCE_S, until

CONFIG: dict[str, object] = {"slots_config": {"feature": {"dim": 4}}}


@pytest.fixture(autouse=True)
def _children_find_this_module(monkeypatch: Monkey) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("PERSIA_RPC_TIMEOUT", str(PATIENCE_S))


@pytest.fixture
def directory() -> Any:
    with short_directory() as made:
        yield made


@dataclass
class Kept:
    """Functions for the processes of a job, which write what they saw into a directory."""

    directory: Path

    def write(self, name: str, *values: object) -> None:
        (self.directory / name).write_text(" ".join(map(str, values)))

    def load(self) -> None:
        number = env.get_replica_index()
        rank = env.get_rank()
        self.write(f"loader{number}", env.get_replica_size(), rank, "torch" in sys.modules)

    def train(self) -> None:
        with transport() as made:
            (worker,) = connect_embedding_workers(made)
            sizes = worker.get_embedding_size()
            worker.close()
        name = f"rank{env.get_rank()}"
        listed = len(env.nn_worker_addresses())
        self.write(name, env.get_world_size(), env.get_local_rank(), sizes, listed)

    def read(self) -> dict[str, str]:
        return {path.name: path.read_text() for path in sorted(self.directory.iterdir())}


def assert_nothing_is_left(directory: str) -> None:
    assert not processes_with(directory)
    assert not Path(directory).exists()


def private_directory() -> str:
    return str(Path(env.parameter_server_addresses()[0].removeprefix("ipc://")).parent)


def test_functions_run_as_data_loaders_and_nn_workers(directory: Path) -> None:
    kept = Kept(directory)
    before = dict(os.environ)
    with ensure_persia_service(
        kept.load,
        kept.train,
        embedding_config=CONFIG,
        data_loader_replica_num=2,
        nproc_per_node=2,
        embedding_parameter_replica_num=2,
    ) as ctx:
        assert isinstance(ctx, PersiaServiceCtx)
        assert env.get_mode() == "services"
        place = private_directory()
    assert kept.read() == {
        "loader0": "2 None False",
        "loader1": "2 None False",
        "rank0": "2 0 [0, 0] 2",
        "rank1": "2 1 [0, 0] 2",
    }
    assert dict(os.environ) == before
    assert_nothing_is_left(place)


def test_this_process_may_be_the_nn_worker(directory: Path, monkeypatch: Monkey) -> None:
    long = directory / ("x" * 100)  # is not used for sockets
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with ensure_persia_service(embedding_config=CONFIG):
        place = private_directory()
        assert place.startswith("/tmp/persia-")
        Kept(directory).train()
    assert (directory / "rankNone").exists()
    assert_nothing_is_left(place)


def test_w45_configs_may_be_paths_and_ports_count_from_the_one_given(directory: Path) -> None:
    slots, servers = directory / "slots.yml", directory / "global.yml"
    slots.write_text("slots_config:\n  feature: {dim: 4}\n")
    servers.write_text("embedding_parameter_server_config: {capacity: 1000}\n")
    port = persia.helper._free_port()
    with PersiaServiceCtx(
        embedding_config_path=slots,
        global_config_path=str(servers),
        embedding_parameter_server_port=port,
        nats_server_port=4222,
    ) as ctx:
        assert env.parameter_server_addresses() == [f"127.0.0.1:{port}"]
        assert env.embedding_worker_addresses()[0].startswith("ipc://")
        ctx.wait()


def fails() -> None:
    raise ValueError("no such column")


def rests() -> None:
    signal.pause()  # what ends it is a signal


@pytest.mark.parametrize(
    "role", ["data-loader", pytest.param("nn-worker", marks=pytest.mark.slow)]
)
def test_w45_a_function_that_fails_is_raised_here(role: str) -> None:
    functions = {"data_loader_func": rests, "nn_worker_func": rests}
    functions[role.replace("-", "_") + "_func"] = fails
    began = time.monotonic()
    with (
        pytest.raises(RemoteError, match=f"{role} 0 failed:\n(.|\n)*no such column") as raised,
        ensure_persia_service(embedding_config=CONFIG, **functions),
    ):
        place = private_directory()
    assert "in fails\n" in str(raised.value)
    assert time.monotonic() - began < PATIENCE_S / 2
    assert_nothing_is_left(place)


def end_worker(ctx: PersiaServiceCtx, number: int) -> None:
    (worker,) = [one for one in ctx._processes if one.role == "embedding-worker"]
    os.kill(worker.child.process.pid, number)
    ctx.wait(PATIENCE_S)


@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGTERM, marks=pytest.mark.slow), signal.SIGKILL]
)
def test_w45_a_server_that_ends_is_noticed(number: int) -> None:
    with (
        pytest.raises(RemoteError, match="embedding-worker 0 ended with status"),
        ensure_persia_service(nn_worker_func=rests, embedding_config=CONFIG) as ctx,
    ):
        end_worker(ctx, number)


def test_an_exception_in_the_body_ends_everything() -> None:
    places = []

    def fail() -> None:
        places.append(private_directory())
        raise KeyError("mine")

    with (
        pytest.raises(KeyError, match="mine"),
        ensure_persia_service(rests, rests, embedding_config=CONFIG),
    ):
        fail()
    assert_nothing_is_left(places[0])


def resists() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    (Path(private_directory()) / "resists").touch()
    while True:
        signal.pause()


@pytest.mark.slow
def test_a_function_that_does_not_end_is_killed_before_servers_are_asked(
    monkeypatch: Monkey,
) -> None:
    monkeypatch.setattr(persia.helper, "_LEAVE_S", 1e6)
    ctx = ensure_persia_service(resists, embedding_config=CONFIG)

    def stop() -> None:
        with ctx:
            places.append(Path(private_directory()))
            until((places[0] / "resists").exists)
            raise KeyboardInterrupt

    places: list[Path] = []
    with pytest.raises(KeyboardInterrupt):
        stop()
    ends = {process.role: process.end for process in ctx._processes}
    loader = ends.pop("data-loader")
    assert loader is not None
    assert loader.status == 128 + signal.SIGKILL
    assert all(end is not None and end.status != loader.status for end in ends.values())
    assert_nothing_is_left(str(places[0]))


def unwinds(directory: Path) -> None:
    try:
        (directory / "begun").touch()
        while True:
            signal.pause()
    finally:
        (directory / "unwound").touch()


@pytest.mark.slow
def test_after_a_failure_a_function_has_longer_to_unwind_than_after_an_interrupt(
    monkeypatch: Monkey, tmp_path: Path
) -> None:
    monkeypatch.setattr(persia.helper, "UNWIND_S", 0.0)
    monkeypatch.setattr(persia.helper, "_LEAVE_S", 120.0)

    def fail() -> None:
        with ensure_persia_service(partial(unwinds, tmp_path), embedding_config=CONFIG):
            until((tmp_path / "begun").exists)
            raise ValueError("the body fails")

    with pytest.raises(ValueError, match="the body fails"):
        fail()
    assert (tmp_path / "unwound").exists()


def test_waiting_has_a_deadline() -> None:
    with (
        pytest.raises(ServiceTimeout, match=r"nn-worker 0: not ended within 0\.1 s"),
        ensure_persia_service(nn_worker_func=rests, embedding_config=CONFIG) as ctx,
    ):
        ctx.wait(0.1)


def test_a_port_in_use_is_an_error_at_once_and_names_it() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        ctx = ensure_persia_service(embedding_config=CONFIG, embedding_worker_port=port)
        with pytest.raises(RemoteError, match=f"cannot listen at tcp://127.0.0.1:{port}"), ctx:
            pass
    assert env.get_mode() == "embedded"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nproc_per_node": 0}, r"nproc_per_node must be in 1\.\.8, got 0"),
        ({"nproc_per_node": 9}, r"nproc_per_node must be in 1\.\.8, got 9"),
        ({"embedding_config_path": "x"}, "expected one of embedding_config and embedding_conf"),
        ({"embedding_config": None}, "expected embedding_config or embedding_config_path"),
        ({"embedding_config": {"slots_config": {}}}, "slots_config"),
        ({"global_config": {"nothing": 1}}, "nothing"),
        ({"embedding_worker_replica_num": 0}, "number of embedding-workers must be at least 1"),
    ],
)
def test_mistakes_are_found_before_anything_starts(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        ensure_persia_service(**({"embedding_config": CONFIG} | options))


BODY = """
import signal
from persia.helper import ensure_persia_service
from tests.test_helper import CONFIG, rests, private_directory
# A shell that starts the tests in the background has them ignore Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)
with ensure_persia_service(rests, embedding_config=CONFIG):
    print(private_directory(), flush=True)
    signal.pause()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_ctrl_c_and_kill_leave_no_process(number: int) -> None:
    started = subprocess.Popen(
        [sys.executable, "-c", BODY],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    assert started.stdout is not None
    place = started.stdout.readline().strip()
    os.killpg(started.pid, number)
    assert started.wait(PATIENCE_S) == -number
    wait_until_gone(place)
    assert Path(place).exists() == (number == signal.SIGKILL)
    started.stdout.close()
