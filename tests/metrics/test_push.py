"""A push gateway, by the original's keys."""

from __future__ import annotations

import http.server
import queue
import threading
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any

from persia import env
from persia._cluster.process_metrics import push_settings
from persia._metrics.definitions import SERVER, WORKER
from persia._metrics.endpoint import Endpoint
from persia._metrics.push import PushSettings
from persia.config import GlobalConfig
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pytest

DEADLINE_S = 30.0
NEVER_S = 3600.0


def well() -> str:
    return ""


@contextmanager
def gateway() -> Iterator[tuple[str, queue.SimpleQueue[tuple[str, str, str]]]]:
    """Take what is pushed: method, path and text of each."""
    pushed: queue.SimpleQueue[tuple[str, str, str]] = queue.SimpleQueue()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_PUT(self) -> None:
            text = self.rfile.read(int(self.headers["Content-Length"])).decode()
            pushed.put((self.command, self.path, text))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *arguments: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_address[1]}", pushed
        finally:
            server.shutdown()
            thread.join()


def endpoint(role: str, replica: int, interval_s: float) -> Endpoint:
    return Endpoint(role, replica, list, well, well, push=PushSettings("a_job", interval_s))


def test_metrics_are_sent_time_and_again_and_at_the_end() -> None:
    with (
        gateway() as (address, pushed),
        env.changed(PERSIA_METRICS_GATEWAY_ADDR=address, PERSIA_METRICS_PORT="off"),
    ):
        with closing(endpoint(SERVER, 3, 0.01)):
            for _ in range(2):
                method, path, text = pushed.get(timeout=DEADLINE_S)
                assert method == "PUT"
                assert path.startswith("/metrics/job/a_job/")
                assert "/instance/rep_3" in path
                assert "/ip_addr/127.0.0.1" in path
                assert f'persia_ready{{replica="3",role="{SERVER}"}} 1.0' in text
        while not pushed.empty():
            pushed.get()
        with closing(endpoint(SERVER, 3, NEVER_S)):
            assert pushed.empty()
        assert pushed.get(timeout=DEADLINE_S)[0] == "PUT"


def test_w68_roles_of_a_host_do_not_replace_each_other() -> None:
    """The original's roles with one number pushed into one group, and the last one stayed."""
    paths = set()
    with (
        gateway() as (address, pushed),
        env.changed(PERSIA_METRICS_GATEWAY_ADDR=address, PERSIA_METRICS_PORT="off"),
    ):
        for role in (SERVER, WORKER):
            for replica in range(2):
                endpoint(role, replica, NEVER_S).close()
                paths.add(pushed.get(timeout=DEADLINE_S)[1])
    assert len(paths) == 4


def test_w68_a_gateway_that_is_not_there_costs_one_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The original warned every ten seconds, and was on by default."""
    with env.changed(PERSIA_METRICS_GATEWAY_ADDR="127.0.0.1:1", PERSIA_METRICS_PORT="off"):
        served = endpoint(SERVER, 0, 0.001)
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
