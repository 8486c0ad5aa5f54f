"""A server that is a process: busy until it has a service; signals: e2e/test_lifecycle.py."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest

from persia import env
from persia._cluster.connect import connect_parameter_servers
from persia._cluster.job import Event
from persia._cluster.process import (
    Options,
    ServerProcess,
    _load,
    run_embedding_worker,
    run_parameter_server,
)
from persia._rpc.client import Client
from persia._rpc.messages import WireDtypes
from persia._rpc.methods import parameter_server
from persia._rpc.server import serve
from persia._rpc.zmq_transport import ZmqTransport
from persia.config import EmbeddingSchema, GlobalConfig, schema_fingerprint
from persia.errors import ConfigError, ServiceBusy
from tests.support.waiting import answered, until

SCHEMA = EmbeddingSchema.load({"slots_config": {"user": {"dim": 4}}})
TIMEOUT_S = 20.0


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PERSIA_METRICS_PORT", "off")
    monkeypatch.setenv("PERSIA_EMBEDDING_PARAMETER_SERVERS", f"ipc://{tmp_path}/server")
    path = tmp_path / "embedding_config.yml"
    path.write_text("slots_config: {user: {dim: 4}}\n")
    return path


@pytest.fixture
def process(config: Path) -> Iterator[ServerProcess]:
    with ServerProcess(parameter_server(), Options(None, None)) as made:
        made.listen(
            SCHEMA,
            GlobalConfig.load(None),
            lambda: "no rows yet",
            None,
            waits_for=lambda: "it warms up",
        )
        yield made


def test_calls_before_there_is_a_service_are_answered_with_what_is_missing(
    process: ServerProcess,
) -> None:
    (remote,) = connect_parameter_servers(
        process.transport, addresses=[process.server.address], timeout_s=TIMEOUT_S
    )
    with closing(remote):
        with pytest.raises(ServiceBusy, match="waits: it warms up"):
            answered(lambda: remote.client.call("stats", timeout_s=1.5))
        process.server.service = SimpleNamespace(stats=lambda: {"rows": 3})
        assert remote.client.call("stats") == {"rows": 3}


@pytest.mark.parametrize(("is_supervised", "status"), [(False, 7), (True, 0)])
def test_the_exit_status_is_the_jobs_unless_supervised(
    process: ServerProcess, monkeypatch: pytest.MonkeyPatch, is_supervised: bool, status: int
) -> None:
    monkeypatch.setenv("PERSIA_SUPERVISED", str(int(is_supervised)))
    assert not process.has_ended()
    address = process.server.address
    with closing(Client(process.transport, address, parameter_server())) as client:
        client.call("finish_job", 7, True, timeout_s=TIMEOUT_S)
    assert process.wait() == status


def test_a_thread_that_fails_while_the_job_ends_is_raised(process: ServerProcess) -> None:
    address = process.server.address
    with closing(Client(process.transport, address, parameter_server())) as client:
        client.call("finish_job", 0, True, timeout_s=TIMEOUT_S)
    until(process.has_ended)
    process._events.put(Event("failure", error=KeyError("why")))
    with pytest.raises(KeyError, match="why"):
        process.wait()


def test_a_signal_during_recovery_is_not_an_ordered_end(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the state file, whose rows were just found, would be removed."""
    before = signal.getsignal(signal.SIGTERM)

    def recovers(*_: object, **__: object) -> None:
        assert signal.getsignal(signal.SIGTERM) is before
        raise InterruptedError("it is asked to end")

    monkeypatch.setattr("persia._cluster.process.ParameterServer", recovers)
    with pytest.raises(InterruptedError):
        run_parameter_server(Options(config, None))


def test_fewer_addresses_than_replicas_are_warned_of(
    config: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A name may lead to several hosts, and a server may have no list at all."""
    text = "PERSIA_EMBEDDING_PARAMETER_SERVERS lists 1 address(es), but --replica-size is 2"
    for listed, num_lines in (("127.0.0.1:1", 1), ("servers:1", 0), ("", 0)):
        caplog.clear()
        monkeypatch.setenv("PERSIA_EMBEDDING_PARAMETER_SERVERS", listed)
        _load(Options(config, None, replica_size=2), env.parameter_server_addresses)
        assert sum(text in line for line in caplog.messages) == num_lines


def test_replicas_outside_the_set_are_refused(config: Path) -> None:
    with pytest.raises(ConfigError, match=r"--replica-index must be in 0\.\.1"):
        run_parameter_server(Options(config, None, replica_index=2, replica_size=2))
    with pytest.raises(ConfigError, match="expected an embedding config"):
        run_parameter_server(Options(None, None))


def test_an_embedding_worker_that_sends_floats_otherwise_than_its_servers_ends(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PERSIA_EMBEDDING_WORKERS", f"ipc://{tmp_path}/worker")
    settings = tmp_path / "global_config.yml"
    settings.write_text("common_config: {wire_config: {gradient_dtype: bfloat16}}\n")
    address = f"ipc://{tmp_path}/server"
    with closing(ZmqTransport()) as transport:
        server = serve(
            *(transport, address, parameter_server(), object()),
            schema_fingerprint=schema_fingerprint(SCHEMA),
            wire=WireDtypes("float32", "float16"),
        )
        try:
            with pytest.raises(ConfigError) as raised:
                run_embedding_worker(Options(config, settings))
        finally:
            server.stop()
    assert str(raised.value) == (
        f"embedding-parameter-server 0 at {address}: expected common_config.wire_config as "
        "here, row_dtype: float32, gradient_dtype: bfloat16, got row_dtype: float32, "
        "gradient_dtype: float16; all processes of a job have one global config"
    )
