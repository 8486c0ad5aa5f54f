"""Ports of a server: TLS, addresses in use, and processes that are started again."""

from __future__ import annotations

import os
import signal
import socket
import struct
import threading
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton

from persia._serving import server as servers
from persia._serving.server import ListenSettings, WorkerProcesses, open_listener
from persia.errors import ConfigError
from tests.serving.oip.serving_models import (
    EchoModel,
    FakeRepository,
    rows,
    serving,
)
from tests.support.fixtures import Monkey
from tests.support.processes import run
from tests.support.waiting import PATIENCE_S, until
from tests.support.web import ask


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("tls")
    cert, key = folder / "cert.pem", folder / "key.pem"
    done = run(
        *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"),
        *("-keyout", key, "-out", cert, "-subj", "/CN=localhost"),
        *("-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost"),
    )
    if done.returncode:
        pytest.skip(f"no openssl: {done.stderr}")
    return cert, key


def test_tls_of_both_protocols(pair: tuple[Path, Path]) -> None:
    import ssl

    cert, key = pair
    with serving(FakeRepository(echo=EchoModel()), tls_cert=cert, tls_key=key) as running:
        trusted = ssl.create_default_context(cafile=str(cert))
        assert ask("GET", f"https://{running.http}/v2/health/ready", verify=trusted).is_success
        with pytest.raises(httpx.TransportError):
            ask("GET", f"http://{running.http}/v2/health/ready")
        with triton.InferenceServerClient(
            running.grpc, ssl=True, root_certificates=str(cert)
        ) as client:
            asked = triton.InferInput("x", [3, 4], "FP32").set_data_from_numpy(rows())
            assert np.array_equal(client.infer("echo", [asked]).as_numpy("x"), rows())


def test_a_certificate_that_is_none(pair: tuple[Path, Path], tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.pem"
    wrong.write_text("no certificate")
    with (
        pytest.raises(ConfigError, match=r"wrong\.pem"),
        serving(FakeRepository(), tls_cert=wrong, tls_key=pair[1]),
    ):
        pass


@pytest.mark.parametrize("which", ["http_port", "grpc_port"])
def test_a_port_in_use(which: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with (
            pytest.raises(ConfigError, match=f"cannot listen at 127.0.0.1:{port}"),
            serving(FakeRepository(), **{which: port}),
        ):
            pass


def test_connections_beyond_the_bound_are_answered_503(monkeypatch: Monkey) -> None:
    monkeypatch.setattr(servers, "_BEYOND_S", PATIENCE_S)  # until the caller has asked
    # Else httpx exchanges connections that were idle for 5 s.
    options: Any = {"timeout": PATIENCE_S, "limits": httpx.Limits(keepalive_expiry=None)}
    with serving(FakeRepository(echo=EchoModel()), max_connections=2) as running:
        place = f"http://{running.http}/v2/health/ready"
        with httpx.Client(**options) as one, httpx.Client(**options) as two:
            assert one.get(place).status_code == two.get(place).status_code == 200
            refused = ask("GET", place)
            assert (refused.status_code, refused.headers["connection"]) == (503, "close")
            assert "fewer connections" in refused.json()["error"]
            # Those that are there go on, and their place is free when they end.
            assert one.get(place).status_code == 200
            two.close()
            until(lambda: ask("GET", place).status_code == 200)


def test_connections_of_grpc_are_bounded() -> None:
    with serving(FakeRepository(echo=EchoModel()), max_connections=2) as running:
        host, port = running.grpc.split(":")
        begin = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0"
        held = [socket.create_connection((host, int(port)), PATIENCE_S) for _ in range(2)]
        for one in held:
            one.sendall(begin)
            assert one.recv(9)  # its settings: it is one that the server has

        def is_answered() -> bool:
            options = [("grpc.use_local_subchannel_pool", 1)]
            with grpc.insecure_channel(running.grpc, options) as channel:
                check = channel.unary_unary("/grpc.health.v1.Health/Check")
                try:
                    return bool(check(b"", timeout=PATIENCE_S))
                except grpc.RpcError:
                    return False

        assert not is_answered()
        held.pop().close()
        until(is_answered)
        held.pop().close()


def test_nothing_is_written_to_a_connection_that_is_gone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    entered, go_on = threading.Event(), threading.Event()

    def hold(inputs: object) -> None:
        entered.set()
        assert go_on.wait(PATIENCE_S)

    model = EchoModel()
    model.before = hold
    body = b'{"inputs":[{"name":"x","shape":[1,4],"datatype":"FP32","data":[1,2,3,4]}]}'
    asked = b"POST /v2/models/echo/infer HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n%b"
    with serving(FakeRepository(echo=model), grpc_port=None) as running:
        host, port = running.http.split(":")
        with socket.create_connection((host, int(port)), PATIENCE_S) as one:
            one.sendall(asked % (len(body), body) * 3)
            assert entered.wait(PATIENCE_S)
            # Gone without a word, with what was asked at once.
            one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        assert ask("GET", f"http://{running.http}/v2/health/live").is_success
        go_on.set()
        infer = f"http://{running.http}/v2/models/echo/infer"
        assert ask("POST", infer, content=body).is_success
        assert running.service.drain(PATIENCE_S)
    assert not [one for one in caplog.records if one.levelname == "ERROR"]


def test_shared_and_unknown_addresses() -> None:
    with open_listener("127.0.0.1", 0, shares=True) as first:
        port = first.getsockname()[1]
        with open_listener("127.0.0.1", port, shares=True) as second:
            assert second.getsockname()[1] == port
    with pytest.raises(ConfigError, match="cannot listen"):
        open_listener("no.such.host.invalid", 0, shares=False)


def test_the_certificate_needs_its_key() -> None:
    with pytest.raises(ConfigError, match="together"):
        ListenSettings(tls_key=Path("key.pem")).check()


SCRIPT = """
import os, pathlib, sys, threading, signal
folder = pathlib.Path(sys.argv[1])
end = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: end.set())
(folder / f"new-{os.getpid()}").touch()
(folder / f"new-{os.getpid()}").rename(folder / str(os.getpid()))
end.wait(60)
"""


def test_a_worker_that_dies_is_started_again(tmp_path: Path) -> None:
    processes = WorkerProcesses(["-c", SCRIPT, str(tmp_path)], 2, drain_s=PATIENCE_S)
    result: list[int] = []
    thread = threading.Thread(target=lambda: result.append(processes.run()))
    thread.start()

    def pids() -> list[int]:
        return [int(path.name) for path in tmp_path.iterdir() if path.name.isdigit()]

    try:
        until(lambda: len(pids()) == 2)
        os.kill(pids()[0], signal.SIGKILL)
        until(lambda: len(pids()) == 3)
    finally:
        processes.stop()
        thread.join(PATIENCE_S)
    assert result == [0]


def test_a_setting_that_is_refused_ends_all(tmp_path: Path) -> None:
    processes = WorkerProcesses(["-c", "raise SystemExit(2)"], 1, drain_s=PATIENCE_S)
    assert processes.run() == 2
