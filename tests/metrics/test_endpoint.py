"""The port of a process: where it is, what it answers, and that it goes."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest

from persia import env
from persia._metrics import endpoint as endpoints
from persia._metrics.definitions import LOADER, SERVER, TRAINER, WORKER
from persia._metrics.endpoint import Endpoint, default_port
from persia._metrics.registry import MetricSource, Sample
from persia.errors import ConfigError
from tests.metrics.job import fetch

WHY: list[str] = []


def why() -> str:
    return "; ".join(WHY)


def endpoint(role: str = SERVER, number: int = 0, local_rank: int = 0) -> Endpoint:
    rows = MetricSource(role, number, "rows", WHY, lambda: [Sample("persia_rows", 7)])
    return Endpoint(role, number, lambda: [rows], why, lambda: "", local_rank=local_rank)


def test_it_answers_three_questions() -> None:
    with env.changed(PERSIA_METRICS_PORT=0), closing(endpoint()) as served:
        assert served.url.startswith("http://127.0.0.1:")
        text = fetch(f"{served.url}/metrics")[1]
        assert f'persia_rows{{replica="0",role="{SERVER}"}} 7.0' in text
        assert "# HELP persia_rows Rows held.\n# TYPE persia_rows gauge\n" in text
        assert fetch(f"{served.url}/readyz") == (200, "ok\n")
        WHY.append("not yet")
        try:
            assert fetch(f"{served.url}/readyz") == (503, "not yet\n")
            assert served.metrics.value("persia_ready") == 0
        finally:
            WHY.clear()
        assert fetch(f"{served.url}/healthz") == (200, "ok\n")
        assert fetch(f"{served.url}/metrics/../secrets")[0] == 404


def test_a_question_that_fails_is_answered() -> None:
    def fail() -> str:
        raise ConfigError("what it is")

    with (
        env.changed(PERSIA_METRICS_PORT=0),
        closing(Endpoint(SERVER, 0, list, fail, fail)) as served,
    ):
        assert fetch(f"{served.url}/readyz") == (503, "ConfigError: what it is\n")
        assert served.metrics.value("persia_healthy") == 0
        assert fetch(f"{served.url}/metrics")[0] == 200


def test_nothing_is_left() -> None:
    before = set(threading.enumerate())
    with env.changed(PERSIA_METRICS_PORT=0):
        served = endpoint()
        port = int(served.url.rpartition(":")[2])
        served.close()
    assert set(threading.enumerate()) <= before
    with socket.socket() as again:
        again.bind(("127.0.0.1", port))


def test_ports_of_roles_and_replicas_differ() -> None:
    roles = (LOADER, WORKER, SERVER, TRAINER)
    ports = [default_port(role, number) for role in roles for number in range(100)]
    assert ports == list(range(9400, 9800))


def test_a_default_port_that_is_taken_is_another() -> None:
    with (
        env.changed(PERSIA_METRICS_PORT=None),
        closing(endpoint(SERVER, 7)) as first,
        closing(endpoint(SERVER, 7)) as second,
    ):
        assert first.url != second.url
        assert fetch(f"{second.url}/healthz") == (200, "ok\n")


def test_a_port_that_was_asked_for_is_taken_or_an_error() -> None:
    with env.changed(PERSIA_METRICS_PORT=0), closing(endpoint()) as served:
        port = int(served.url.rpartition(":")[2])
        refused = pytest.raises(ConfigError, match=f"PERSIA_METRICS_PORT.*:{port}")
        with env.changed(PERSIA_METRICS_PORT=port), refused:
            endpoint(SERVER, 5)
        with env.changed(PERSIA_METRICS_PORT=port - 1), refused:
            endpoint(TRAINER, 5, local_rank=1)


@pytest.mark.parametrize("text", ["-1", "65536", "http"])
def test_what_is_no_port_is_an_error(text: str) -> None:
    with env.changed(PERSIA_METRICS_PORT=text), pytest.raises(ConfigError):
        endpoint()


def test_off_is_off() -> None:
    with env.changed(PERSIA_METRICS_PORT="off"), closing(endpoint()) as served:
        assert served.url == ""
        assert served.metrics.value("persia_rows") == 7


def test_a_stranger_learns_little_and_holds_nobody_up() -> None:
    with env.changed(PERSIA_METRICS_PORT=0), closing(endpoint()) as served:
        port = int(served.url.rpartition(":")[2])
        silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(7)]
        try:
            with socket.create_connection(("127.0.0.1", port), 10.0) as peer:
                peer.sendall(b"POST /metrics HTTP/1.0\r\n\r\n")
                answer = peer.makefile("rb").read()
            assert b" 501 " in answer
            assert b"Python" not in answer
            assert fetch(f"{served.url}/healthz") == (200, "ok\n")
        finally:
            for one in silent:
                one.close()


def test_who_sends_byte_by_byte_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoints, "_REQUEST_S", 0.3)
    with env.changed(PERSIA_METRICS_PORT=0), closing(endpoint()) as served:
        port = int(served.url.rpartition(":")[2])
        slow = [socket.create_connection(("127.0.0.1", port), 10.0) for _ in range(8)]
        try:
            deadline, left = time.monotonic() + 10.0, slow.copy()
            while left:  # each byte well before the time of the one before is over
                assert time.monotonic() < deadline
                for one in slow:
                    try:
                        one.send(b"G", socket.MSG_NOSIGNAL)
                    except OSError:
                        left = [other for other in left if other is not one]
                threading.Event().wait(0.05)
            assert fetch(f"{served.url}/healthz") == (200, "ok\n")
        finally:
            for one in slow:
                one.close()


def test_the_run_keeps_its_name_wherever_its_script_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("clicks", "elsewhere"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "clicks")
    off = env.changed(PERSIA_METRICS_PORT="off", PERSIA_RUN_ID=None)
    with off, closing(endpoint()) as served:
        monkeypatch.chdir(tmp_path / "elsewhere")
        assert 'run="clicks"' in served.metrics.text()
