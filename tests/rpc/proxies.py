"""What stands between a client and a server in the tests of faults."""

from __future__ import annotations

import contextlib
import itertools
import select
import selectors
import socket as sockets
import threading
from collections.abc import Callable
from typing import Any

import zmq

_CHUNK = 1 << 16


class TcpProxy:
    """Passes bytes on, until it is set to hold them back or to cut connections.

    Args:
        upstream: A server's address, ``tcp://host:port``.
        cut_after: A connection is cut once it has passed this number of bytes, either way; the
            next one takes the next number. None passes everything.
    """

    def __init__(self, upstream: str, cut_after: tuple[int | None, ...] = (None,)) -> None:
        host, _, port = upstream.removeprefix("tcp://").rpartition(":")
        self._upstream = (host, int(port))
        self._cut_after = itertools.chain(cut_after, itertools.repeat(cut_after[-1]))
        self._listening = sockets.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listening.getsockname()[1]}"
        self.num_cut = 0
        self._passes = threading.Event()
        self._passes.set()
        self._is_over = threading.Event()
        self._open: list[sockets.socket] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def hold(self) -> None:
        """Pass nothing on; both ends stay connected to this proxy."""
        self._passes.clear()

    def go(self) -> None:
        self._passes.set()

    def server_has_closed(self, timeout_s: float) -> bool:
        """Wait until the server has closed a connection, although none of its bytes pass."""
        poller = select.poll()
        for far in self._open[1::2]:
            poller.register(far, select.POLLRDHUP)
        return bool(poller.poll(timeout_s * 1000))

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while not self._is_over.is_set():
                near, _ = self._listening.accept()
                thread = threading.Thread(target=self._pass, args=(near,), daemon=True)
                self._threads.append(thread)
                thread.start()

    def _pass(self, near: sockets.socket) -> None:
        passed = 0
        with contextlib.suppress(OSError), near, contextlib.ExitStack() as stack:
            far = stack.enter_context(sockets.create_connection(self._upstream))
            self._open += [near, far]
            limit = next(self._cut_after)  # now: attempts before the server was there take none
            selector = stack.enter_context(selectors.DefaultSelector())
            selector.register(near, selectors.EVENT_READ, far)
            selector.register(far, selectors.EVENT_READ, near)
            while True:
                for key, _ in selector.select():
                    self._passes.wait()
                    source: Any = key.fileobj
                    data = source.recv(_CHUNK)
                    if not data or self._is_over.is_set():
                        return
                    if limit is not None and passed + len(data) > limit:
                        key.data.sendall(data[: limit - passed])
                        self.num_cut += 1
                        return
                    key.data.sendall(data)
                    passed += len(data)

    def close(self) -> None:
        self._is_over.set()
        self._passes.set()
        for one in (self._listening, *self._open):
            with contextlib.suppress(OSError):
                one.shutdown(sockets.SHUT_RDWR)
        self._listening.close()
        for thread in self._threads:
            thread.join()


class MessageProxy:
    """Passes messages between DEALERs and a ROUTER, each as often as ``fate`` says.

    Args:
        front: Where to listen.
        upstream: A server's address.
        fate: Takes the number of a message, from 1; negative for answers. Returns how often it
            is to arrive. Repetitions are kept back until the next message has gone by.
    """

    def __init__(self, front: str, upstream: str, fate: Callable[[int], int]) -> None:
        self._upstream = upstream
        self._fate = fate
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._front = self._context.socket(zmq.ROUTER)
        self._front.bind(front)
        self.address = front
        self._backs: dict[bytes, zmq.Socket[bytes]] = {}
        self._late: list[tuple[zmq.Socket[bytes], list[bytes]]] = []
        self._stop, self._stopped = sockets.socketpair()
        self.num_dropped = self.num_repeated = 0
        self._counts = [0, 0]  # messages, answers
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._stopped.fileno(), zmq.POLLIN)
        poller.register(self._front, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if self._stopped.fileno() in ready:
                break
            if self._front in ready:
                peer, *parts = self._front.recv_multipart()
                if peer not in self._backs:
                    self._backs[peer] = self._context.socket(zmq.DEALER)
                    self._backs[peer].connect(self._upstream)
                    poller.register(self._backs[peer], zmq.POLLIN)
                self._counts[0] += 1
                self._deal(self._counts[0], self._backs[peer], parts)
            for peer, back in self._backs.items():
                if back in ready:
                    self._counts[1] += 1
                    answer = [peer, *back.recv_multipart()]
                    self._deal(-self._counts[1], self._front, answer)
        for socket in (self._front, *self._backs.values()):
            socket.close(linger=0)
        self._context.term()

    def _deal(self, number: int, socket: zmq.Socket[bytes], parts: list[bytes]) -> None:
        copies = self._fate(number)
        if copies:
            socket.send_multipart(parts)
        self.num_dropped += not copies
        self.num_repeated += max(0, copies - 1)
        late, self._late = self._late, [(socket, parts)] * (copies - 1)
        for where, what in late:
            where.send_multipart(what)

    def close(self) -> None:
        self._stop.send(b"x")
        self._thread.join()
        self._stop.close()
        self._stopped.close()
