"""The port of a process: where it is, what it answers, that it goes; and a push gateway."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from unittest.mock import Mock

import pytest

from persia import env
from persia._cluster.process_metrics import push_settings
from persia._metrics import endpoint as endpoints
from persia._metrics.definitions import SERVER, TRAINER, WORKER
from persia._metrics.endpoint import Endpoint, PushSettings
from persia._metrics.registry import MetricSource, Sample
from persia.config import GlobalConfig
from persia.errors import ConfigError
from tests.metrics.job import fetch
from tests.support import web
from tests.support.fixtures import Log, Monkey
from tests.support.waiting import until

DEADLINE_S = 30.0
NEVER_S = 3600.0
WHY: list[str] = []


def why() -> str:
    return "; ".join(WHY)


def endpoint(
    role: str = SERVER, number: int = 0, local_rank: int = 0, every_s: float | None = None
) -> Endpoint:
    rows = MetricSource(role, number, "rows", WHY, lambda: [Sample("persia_rows", 7)])
    push = None if every_s is None else PushSettings("a_job", every_s)
    return Endpoint(
        role, number, lambda: [rows], why, lambda: "", local_rank=local_rank, push=push
    )


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
    fail = Mock(side_effect=ConfigError("what it is"))
    with (
        env.changed(PERSIA_METRICS_PORT=0),
        closing(Endpoint(SERVER, 0, list, fail, fail)) as served,
    ):
        assert fetch(f"{served.url}/readyz") == (503, "ConfigError: what it is\n")
        assert served.metrics.value("persia_healthy") == 0
        assert fetch(f"{served.url}/metrics")[0] == 200


def test_a_default_port_that_is_taken_is_another() -> None:
    with (
        env.changed(PERSIA_METRICS_PORT=None),
        closing(endpoint(SERVER, 7)) as first,
        closing(endpoint(SERVER, 7)) as second,
    ):
        assert first.url != second.url
        assert fetch(f"{second.url}/healthz") == (200, "ok\n")


def test_a_port_that_was_asked_for_is_taken_or_an_error() -> None:
    before = set(threading.enumerate())
    with env.changed(PERSIA_METRICS_PORT=0), closing(endpoint()) as served:
        port = int(served.url.rpartition(":")[2])
        refused = pytest.raises(ConfigError, match=f"PERSIA_METRICS_PORT.*:{port}")
        with env.changed(PERSIA_METRICS_PORT=port), refused:
            endpoint(SERVER, 5)
        with env.changed(PERSIA_METRICS_PORT=port - 1), refused:
            endpoint(TRAINER, 5, local_rank=1)
    # Nothing is left of the one that was open.
    assert set(threading.enumerate()) <= before
    with socket.socket() as again:
        again.bind(("127.0.0.1", port))
    for text in ("-1", "65536", "http"):
        with env.changed(PERSIA_METRICS_PORT=text), pytest.raises(ConfigError):
            endpoint()


@contextmanager
def connected(port: int, number: int) -> Iterator[list[socket.socket]]:
    with ExitStack() as stack:
        made = (
            socket.create_connection(("127.0.0.1", port), DEADLINE_S) for _ in range(number)
        )
        yield [stack.enter_context(one) for one in made]


def test_a_stranger_learns_little_and_holds_nobody_up() -> None:
    with env.changed(PERSIA_METRICS_PORT=0), closing(endpoint()) as served:
        port = int(served.url.rpartition(":")[2])
        # A permit comes back a moment after the answer, so one is left over.
        with connected(port, 6), connected(port, 1) as (peer,):
            peer.sendall(b"POST /metrics HTTP/1.0\r\n\r\n")
            answer = peer.makefile("rb").read()
            assert b" 501 " in answer
            assert b"Python" not in answer
            assert fetch(f"{served.url}/healthz") == (200, "ok\n")


def test_who_sends_byte_by_byte_is_cut_off(monkeypatch: Monkey) -> None:
    with env.changed(PERSIA_METRICS_PORT=0), closing(endpoint()) as served:
        port = int(served.url.rpartition(":")[2])
        with monkeypatch.context() as patch, ExitStack() as stack:
            patch.setattr(endpoints, "_REQUEST_S", 0.3)
            slow = stack.enter_context(connected(port, 8))
            left = slow.copy()

            def are_cut_off() -> (
                bool
            ):  # each byte well before the time of the one before is over
                for one in slow:
                    try:
                        one.send(b"G", socket.MSG_NOSIGNAL)
                    except OSError:
                        left[:] = [other for other in left if other is not one]
                return not left

            until(are_cut_off, look_s=0.05)
            # Permits come back a moment later.
            assert served._server is not None
            permits = served._server._permits
            until(lambda: permits._value == endpoints._MAX_REQUESTS)
        assert fetch(f"{served.url}/healthz") == (200, "ok\n")


def test_off_is_off_and_the_run_keeps_its_name_wherever_its_script_goes(
    tmp_path: Path, monkeypatch: Monkey
) -> None:
    (tmp_path / "clicks").mkdir()
    monkeypatch.chdir(tmp_path / "clicks")
    off = env.changed(PERSIA_METRICS_PORT="off", PERSIA_RUN_ID=None)
    with off, closing(endpoint()) as served:
        assert served.url == ""
        assert served.metrics.value("persia_rows") == 7
        monkeypatch.chdir(tmp_path)
        assert 'run="clicks"' in served.metrics.text()


# --- the push gateway -----------------------------------------------------------------------


@contextmanager
def gateway() -> Iterator[queue.SimpleQueue[tuple[str, str]]]:
    """Take what is pushed: path and text of each."""
    pushed: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()

    def take(path: str, text: str) -> str:
        pushed.put((path, text))
        return ""

    with web.answering(take) as port:
        address = f"127.0.0.1:{port}"
        with env.changed(PERSIA_METRICS_GATEWAY_ADDR=address, PERSIA_METRICS_PORT="off"):
            yield pushed


def test_metrics_are_sent_time_and_again_and_at_the_end() -> None:
    with gateway() as pushed:
        with closing(endpoint(SERVER, 3, every_s=0.01)):
            for _ in range(2):
                path, text = pushed.get(timeout=DEADLINE_S)
                assert path.startswith("/metrics/job/a_job/")
                assert "/instance/rep_3" in path
                assert "/ip_addr/127.0.0.1" in path
                assert f'persia_ready{{replica="3",role="{SERVER}"}} 1.0' in text
        while not pushed.empty():
            pushed.get()
        with closing(endpoint(SERVER, 3, every_s=NEVER_S)):
            assert pushed.empty()
        pushed.get(timeout=DEADLINE_S)


def test_w68_roles_of_a_host_do_not_replace_each_other() -> None:
    """The original's roles with one number pushed into one group, and the last one stayed."""
    paths = set()
    with gateway() as pushed:
        for role in (SERVER, WORKER):
            for replica in range(2):
                endpoint(role, replica, every_s=NEVER_S).close()
                paths.add(pushed.get(timeout=DEADLINE_S)[0])
    assert len(paths) == 4


def test_w68_a_gateway_that_is_not_there_costs_one_line(caplog: Log) -> None:
    """The original warned every ten seconds, and was on by default."""
    with env.changed(PERSIA_METRICS_GATEWAY_ADDR="127.0.0.1:1", PERSIA_METRICS_PORT="off"):
        served = endpoint(SERVER, 0, every_s=0.001)
        pusher = served._pusher
        assert pusher is not None
        until(lambda: pusher._failing)
        served.close()
    assert len([one for one in caplog.records if "cannot be sent" in one.message]) == 1
    assert push_settings(GlobalConfig.load({})) is None


def test_the_original_keys_say_how() -> None:
    section = {"enable_metrics": True, "job_name": "clicks", "push_interval_seconds": 7}
    config = GlobalConfig.load({"common_config": {"metrics_config": section}})
    assert push_settings(config) == PushSettings("clicks", 7.0)
