"""The port of a process where it tells how it is: /metrics, /healthz, /readyz.

    /metrics   every metric, in Prometheus' text format
    /healthz   200 while the threads that serve live, else 503 and why
    /readyz    200 while it is configured and can be used, else 503 and why

Which port that is:

    PERSIA_METRICS_PORT    not set: 9400 + replica of a data-loader, 9500 + of an
                           embedding-worker, 9600 + of an embedding-parameter-server,
                           9700 + local rank of an nn-worker
                           a number: that one, as for containers; + local rank of an nn-worker
                           0: one that the kernel chooses
                           off: none
    PERSIA_METRICS_HOST    where it listens; 127.0.0.1

One of the default ports may be another job's: then the kernel chooses, and a line says which.
A few threads answer, each for a few seconds at most; beyond them a connection is closed at
once.
"""

from __future__ import annotations

import contextlib
import logging
import math
import selectors
import threading
import time
from collections.abc import Callable, Iterable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socket import AF_INET6, SHUT_RDWR, socketpair
from socketserver import TCPServer
from typing import Any

from persia import env
from persia._metrics.definitions import LOADER, SERVER, TRAINER, WORKER
from persia._metrics.push import Pusher, PushSettings
from persia._metrics.registry import CONTENT_TYPE, Metrics, Sample, Source
from persia.errors import ConfigError
from persia.version import __version__

logger = logging.getLogger(__name__)

DEFAULT_PORTS = {LOADER: 9400, WORKER: 9500, SERVER: 9600, TRAINER: 9700}

# Answered at a time; and seconds that a request may take to come, or its answer to leave.
_MAX_REQUESTS = 8
_REQUEST_S = 5.0

# Says why not; "" if all is well.
Why = Callable[[], str]


def default_port(role: str, index: int) -> int:
    """Return where a process listens if nothing is said.

    Args:
        role: Its role.
        index: Its replica number; of an nn-worker, its local rank.
    """
    return DEFAULT_PORTS[role] + index


class Endpoint:
    """Serves one process until it is closed.

    Args:
        role: Of this process.
        replica: Its number, or rank.
        sources: What is to be told.
        ready: Why it cannot be used now.
        healthy: Why it is not well.
        local_rank: Of an nn-worker, of which one container has several.
        push: How metrics are sent to a gateway, if they are.
    """

    def __init__(
        self,
        role: str,
        replica: int,
        sources: Callable[[], Iterable[Source]],
        ready: Why,
        healthy: Why,
        *,
        local_rank: int = 0,
        push: PushSettings | None = None,
    ) -> None:
        self._role, self._replica = role, replica
        self._run = env.run_name()  # now: a script may go to another folder, or lose this one
        self._why = {"/readyz": ready, "/healthz": healthy}
        self.metrics = Metrics(lambda: [self._own(), *sources()])
        self._server: _Server | None = None
        self._thread: threading.Thread | None = None
        port = env.metrics_port()
        if port != "off":
            self._start(port, local_rank)
        self._pusher: Pusher | None = None
        if push is not None:
            self._pusher = Pusher(self.metrics, push, role, replica)

    def _start(self, asked: int | None, local_rank: int) -> None:
        host = env.metrics_host()
        if asked is None:
            index = local_rank if self._role == TRAINER else self._replica
            asked = default_port(self._role, index)
            try:
                self._server = _Server(host, asked, self)
            except OSError:
                self._server = _Server(host, 0, self)
        else:
            port = asked + local_rank if asked else 0
            try:
                self._server = _Server(host, port, self)
            except OSError as exc:
                raise ConfigError(
                    f"PERSIA_METRICS_PORT: cannot listen at {host}:{port}: {exc}"
                ) from exc
        self._thread = threading.Thread(
            target=self._server.run, name="persia-metrics", daemon=True
        )
        self._thread.start()
        logger.info("metrics at %s/metrics", self.url)

    @property
    def url(self) -> str:
        """Where it is; "" if it is off."""
        if self._server is None:
            return ""
        host, port = self._server.server_address[:2]
        return f"http://[{host!s}]:{port}" if ":" in str(host) else f"http://{host!s}:{port}"

    def close(self) -> None:
        """Free the port; what was counted last is sent, if anything is."""
        pusher, self._pusher = self._pusher, None
        if pusher is not None:
            pusher.close()
        server, self._server = self._server, None
        if server is not None and self._thread is not None:
            server.stop()
            self._thread.join()

    def _own(self) -> Source:
        return Source(self._role, self._replica, "process", self, self._samples)

    def _samples(self) -> Iterable[Sample]:
        yield Sample("persia_info", 1, {"version": __version__, "run": self._run})
        yield Sample("persia_ready", not self.why("/readyz"))
        yield Sample("persia_healthy", not self.why("/healthz"))

    def why(self, path: str) -> str:
        """Return why the process is not what ``/readyz`` or ``/healthz`` asks for, or ""."""
        try:
            return self._why[path]()
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    def answer(self, path: str) -> tuple[HTTPStatus, str]:
        """Return what is told at a path."""
        if path == "/metrics":
            return HTTPStatus.OK, self.metrics.text()
        if path in self._why:
            why = self.why(path)
            if why:
                return HTTPStatus.SERVICE_UNAVAILABLE, f"{why}\n"
            return HTTPStatus.OK, "ok\n"
        return HTTPStatus.NOT_FOUND, "expected /metrics, /healthz or /readyz\n"


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 16
    timeout = 0  # of handle_request, which is called when there is one

    def __init__(self, host: str, port: int, endpoint: Endpoint) -> None:
        if ":" in host:
            self.address_family = AF_INET6
        self.endpoint = endpoint
        self._room = threading.BoundedSemaphore(_MAX_REQUESTS)
        self._lock = threading.Lock()  # guards the next
        self._until: dict[Any, float] = {}  # by request: monotonic; infinite if cut off
        super().__init__((host.strip("[]"), port), _Handler)
        self._wake_in, self._wake_out = socketpair()

    def server_bind(self) -> None:
        """Bind, and ask no name server who this host is, as HTTPServer does."""
        TCPServer.server_bind(self)

    def run(self) -> None:
        """Take requests until ``stop``; unlike ``serve_forever`` it sleeps in between."""
        with selectors.DefaultSelector() as selector, self._wake_in, self:
            selector.register(self, selectors.EVENT_READ)
            selector.register(self._wake_in, selectors.EVENT_READ)
            ready: list[object] = []
            while self._wake_in not in ready:
                if ready:
                    self.handle_request()
                ready = [key.fileobj for key, _ in selector.select(self._cut_off())]

    def stop(self) -> None:
        """End ``run``, which closes the port."""
        self._wake_out.close()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread, if there is one."""
        if not self._room.acquire(blocking=False):
            self.shutdown_request(request)
            return
        with self._lock:
            self._until[request] = time.monotonic() + _REQUEST_S
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer, in that thread."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    def has_come(self, request: Any) -> None:
        """Leave a request its time from now on: the answer may take long, on a busy machine."""
        with self._lock:
            self._until.pop(request, None)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection."""
        self.has_come(request)
        super().shutdown_request(request)

    def _cut_off(self) -> float | None:
        """End requests that take too long; returns the seconds until the next may.

        A socket's own time begins anew with each byte.
        """
        now = time.monotonic()
        with self._lock:
            for request, until in self._until.items():
                if until <= now:
                    self._until[request] = math.inf
                    with contextlib.suppress(OSError):
                        request.shutdown(SHUT_RDWR)
            first = min(self._until.values(), default=math.inf)
        return None if first == math.inf else first - now

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Whoever leaves before the answer is nobody's fault."""
        logger.debug("a request from %s was not answered", client_address, exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    timeout = _REQUEST_S
    server: _Server

    def do_GET(self) -> None:  # the library's name
        """Answer."""
        self.server.has_come(self.connection)
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
        """Tell nothing of what runs here."""
        return "persia"

    def log_message(self, format: str, *arguments: Any) -> None:
        """Say nothing: it is asked every few seconds."""
