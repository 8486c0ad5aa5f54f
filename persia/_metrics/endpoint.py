"""How the metrics of a process leave it: its HTTP port, and a push gateway.

    /metrics   every metric, in Prometheus' text format
    /healthz   200 while the threads that serve live, else 503 and why
    /readyz    200 while it is configured and can be used, else 503 and why

docs/metrics.md says where it listens. A few threads answer, each for a few seconds at most;
further connections are closed at once.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections.abc import Callable, Iterable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import Any, NamedTuple

from persia import env
from persia._metrics.definitions import LOADER, SERVER, SERVING, TRAINER, WORKER
from persia._metrics.registry import CONTENT_TYPE, Metrics, MetricSource, Sample
from persia.errors import ConfigError
from persia.version import __version__

logger = logging.getLogger(__name__)

DEFAULT_PORTS = {LOADER: 9400, WORKER: 9500, SERVER: 9600, TRAINER: 9700, SERVING: 9800}

# Seconds of a request; between two looks whether the port is to be closed; of a push, and of
# the last one, as the process ends.
_REQUEST_S, _POLL_S, _PUSH_S, _LAST_PUSH_S = 5.0, 0.1, 5.0, 1.0
# Requests at a time.
_MAX_REQUESTS = 8

# Returns what is wrong; "" if nothing is.
Check = Callable[[], str]


class PushSettings(NamedTuple):
    """Settings of section ``metrics_config``."""

    job_name: str
    interval_s: float


def default_port(role: str, index: int) -> int:
    """Return the port of a replica, or of a local rank, without ``PERSIA_METRICS_PORT``."""
    return DEFAULT_PORTS[role] + index


class Endpoint:
    """Serves one process until it is closed.

    Args:
        role: Of this process.
        replica: Its number, or rank.
        sources: Returns the sources of its metrics.
        ready: Returns why it cannot be used now.
        healthy: Returns which of its threads have failed.
        local_rank: Of an nn-worker: one container has several.
        push: Where metrics are pushed; None: nowhere.
    """

    def __init__(
        self,
        role: str,
        replica: int,
        sources: Callable[[], Iterable[MetricSource]],
        ready: Check,
        healthy: Check,
        *,
        local_rank: int = 0,
        push: PushSettings | None = None,
    ) -> None:
        self._role, self._replica = role, replica
        self._run = env.run_name()  # now: a script may change its directory, or remove it
        self._checks = {"/readyz": ready, "/healthz": healthy}
        own = MetricSource(role, replica, "process", self, self._samples)
        self.metrics = Metrics(lambda: [own, *sources()])
        self.url = ""  # address of the endpoint; "" if it is off
        self._server: _Server | None = None
        port = env.metrics_port()
        if port != "off":
            self._start(port, local_rank)
        self._pusher = Pusher(self.metrics, push, role, replica) if push else None

    def _start(self, asked: int | None, local_rank: int) -> None:
        host = env.metrics_host()
        if asked is None:
            index = local_rank if self._role == TRAINER else self._replica
            port = default_port(self._role, index)
        else:
            port = asked + local_rank if asked else 0
        try:
            self._server = _Server(host, port, self)
        except OSError as exc:
            if asked is not None:
                raise ConfigError(
                    f"PERSIA_METRICS_PORT: cannot listen at {host}:{port}: {exc}"
                ) from exc
            self._server = _Server(host, 0, self)  # the default is another job's
        address, number = map(str, self._server.server_address[:2])
        shown = f"[{address}]" if ":" in address else address
        self.url = f"http://{shown}:{number}"
        logger.info("metrics at %s/metrics", self.url)

    def close(self) -> None:
        """Free the port, after a last push of the metrics."""
        if self._pusher is not None:
            self._pusher.close()
        if self._server is not None:
            self._server.stop()
            self._server = None

    def _samples(self) -> Iterable[Sample]:
        yield Sample("persia_info", 1, {"version": __version__, "run": self._run})
        yield Sample("persia_ready", not self._problem("/readyz"))
        yield Sample("persia_healthy", not self._problem("/healthz"))

    def _problem(self, path: str) -> str:
        try:
            return self._checks[path]()
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    def answer(self, path: str) -> tuple[HTTPStatus, str]:
        """Return status and text of a path."""
        if path == "/metrics":
            return HTTPStatus.OK, self.metrics.text()
        if path in self._checks:
            problem = self._problem(path)
            status = HTTPStatus.SERVICE_UNAVAILABLE if problem else HTTPStatus.OK
            return status, f"{problem or 'ok'}\n"
        return HTTPStatus.NOT_FOUND, "expected /metrics, /healthz or /readyz\n"


class _Server(ThreadingHTTPServer):
    block_on_close = False
    request_queue_size = 16

    def __init__(self, host: str, port: int, endpoint: Endpoint) -> None:
        if ":" in host:
            self.address_family = socket.AF_INET6
        self.endpoint = endpoint
        self._permits = threading.BoundedSemaphore(_MAX_REQUESTS)
        super().__init__((host.strip("[]"), port), _Handler)
        self._thread = threading.Thread(
            target=self.serve_forever, args=(_POLL_S,), name="persia-metrics", daemon=True
        )
        self._thread.start()

    def server_bind(self) -> None:
        """Bind without the lookup of this host's name that HTTPServer does."""
        TCPServer.server_bind(self)

    def stop(self) -> None:
        """Close the port."""
        if self._thread.is_alive():  # it is not in a process that was forked
            self.shutdown()
        self._thread.join()
        self.server_close()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread of its own, or close the connection if too many are open."""
        if self._permits.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer, in that thread."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._permits.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log a client that left before its answer."""
        logger.debug("a request from %s was not answered", client_address, exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    timeout = _REQUEST_S
    server: _Server

    def setup(self) -> None:
        """Give the whole request its time: a socket's timeout restarts with each byte."""
        super().setup()
        self._cut_off = threading.Timer(_REQUEST_S, self._end_request)
        self._cut_off.daemon = True
        self._cut_off.start()

    def finish(self) -> None:
        """Close the streams of the request."""
        self._cut_off.cancel()
        super().finish()

    def _end_request(self) -> None:
        with contextlib.suppress(OSError):  # it was closed meanwhile
            self.connection.shutdown(socket.SHUT_RDWR)

    def do_GET(self) -> None:  # the library's name
        """Answer."""
        self._cut_off.cancel()  # the answer may take long, on a busy machine
        try:
            status, text = self.server.endpoint.answer(self.path.partition("?")[0])
        except Exception:
            logger.exception("metrics cannot be read")
            status, text = HTTPStatus.INTERNAL_SERVER_ERROR, "see the log of this process\n"
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", CONTENT_TYPE)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def version_string(self) -> str:
        """Return a name without versions of Python or the library."""
        return "persia"

    def log_message(self, format: str, *arguments: Any) -> None:
        """Log nothing: requests come every few seconds."""


class Pusher:
    """Pushes the metrics of a process periodically, and once more when it is closed.

    A process replaces its own metrics only: its group is its job, role, number and address. A
    gateway that does not answer is logged once, and once more when it answers again.
    """

    def __init__(
        self, metrics: Metrics, settings: PushSettings, role: str, replica: int
    ) -> None:
        self._metrics = metrics
        self._settings = settings
        self._gateway = env.metrics_gateway()
        self._group = {
            "instance": f"rep_{replica}",
            "ip_addr": _own_address(self._gateway),
            "role": role,
        }
        self._failing = False
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="persia-push", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Push once more, and end the thread."""
        self._closed.set()
        self._thread.join(_PUSH_S + 2 * _LAST_PUSH_S)

    def _run(self) -> None:
        while not self._closed.wait(self._settings.interval_s):
            self._push(_PUSH_S)
        self._push(_LAST_PUSH_S)

    def _push(self, timeout_s: float) -> None:
        from prometheus_client import push_to_gateway

        job, interval_s = self._settings
        registry = self._metrics.registry
        try:
            push_to_gateway(self._gateway, job, registry, self._group, timeout_s)
        except Exception as error:
            # Of any class: training must not fail of its metrics.
            if not self._failing:
                logger.warning(
                    "metrics cannot be sent to %s (%s); trying again every %g s",
                    *(self._gateway, error, interval_s),
                )
            self._failing = True
            return
        if self._failing:
            logger.info("metrics are sent to %s again", self._gateway)
        self._failing = False


def _own_address(gateway: str) -> str:
    """Return the address of this host from which the gateway is reached."""
    host = gateway.rpartition("//")[2].partition("/")[0].rpartition(":")[0]
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # sends nothing
            return str(probe.getsockname()[0])
    except OSError:
        return "127.0.0.1"
