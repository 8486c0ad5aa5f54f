"""A web server that answers what a test says."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import Any

import httpx

from tests.support.waiting import PATIENCE_S


def ask(method: str, url: str, **options: Any) -> httpx.Response:
    """Ask a server; httpx itself gives up after 5 s, which a busy machine may take."""
    return httpx.request(method, url, timeout=PATIENCE_S, **options)


@contextmanager
def answering(
    answer: Callable[[str, str], str], status: int = 200, host: str = "127.0.0.1"
) -> Iterator[int]:
    """Answer each request with what is made of its path and body; yields the port."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            sent = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode()
            body = answer(self.path, sent).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_PUT = do_GET

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    with serving(ThreadingHTTPServer((host, 0), Handler)) as port:
        yield port


@contextmanager
def serving(server: TCPServer) -> Iterator[int]:
    """Serve in another thread; yields the port."""
    with server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join()
