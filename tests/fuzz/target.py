"""Whatever bytes a peer may send, against every role's real service; needs no fuzzer.

An input is one message: a byte that chooses the role, then its parts, each behind its length
as u16. ``Target.send`` raises ``Finding`` unless the message is answered or counted, soon, by
an error that was meant, and leaves another client served and the process no larger.
"""

from __future__ import annotations

import base64
import contextlib
import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from persia._rpc import messages as m
from persia._rpc.client import Client
from persia._rpc.frame import PROTOCOL, Call, Failure, Part, decode, encode
from persia._rpc.methods import Method, Role, embedding_worker, nn_worker, parameter_server
from persia._rpc.server import ServerLimits, serve
from persia._rpc.zmq_transport import ZmqTransport
from persia._training import receiver
from persia.errors import ProtocolError
from tests.benchmarks.memory import resident
from tests.rpc.support import BAD, RawPeer
from tests.rpc.test_stubs import ask_server, ask_worker
from tests.support.services import ADAM, make_servers, make_worker
from tests.worker.cluster import Faulty

# An input may wait for as long as its own deadline allows, and is to be answered then.
LONGEST_DEADLINE_MS = 20_000
PATIENCE_S = 3 * LONGEST_DEADLINE_MS / 1000
LARGEST_GROWTH = 512 << 20
CORPUS = Path(__file__).parent / "corpus.txt"
_LENGTH = struct.Struct("<H")
# Counted in place of an answer.
_SILENT = ("expired", "repeated")


class Finding(Exception):
    """Something that must not happen."""


class Unmeant(Finding):
    """An error that no service raises on purpose; ``where`` is its last line of code."""

    def __init__(self, body: list[Any]) -> None:
        text, detail = str(body[1]), str(body[-1])
        super().__init__(f"{body[0]}: {text}\n{detail}")
        lines = [line for line in detail.splitlines() if line.startswith("  File ")]
        self.where = f"{text.split(':')[0]} {lines[-1] if lines else ''}"


def to_bytes(role: int, parts: Sequence[Part]) -> bytes:
    """The input that means these parts."""
    return bytes([role]) + b"".join(_LENGTH.pack(len(p)) + bytes(p) for p in parts)


def from_bytes(data: bytes) -> tuple[int, list[bytes]]:
    """The role and parts that an input means; any bytes mean something."""
    role, place, parts = (data[0] if data else 0), 1, []
    while place + _LENGTH.size <= len(data):
        (length,) = _LENGTH.unpack_from(data, place)
        place += _LENGTH.size
        parts.append(data[place : place + length])
        place += length
    return role, parts


def with_deadline(parts: list[bytes]) -> list[bytes]:
    """The same message, if it is a call with a deadline that can be waited for."""
    try:
        call = decode(parts)
    except ProtocolError:
        return parts  # refused before anything waits
    if not isinstance(call, Call) or call.timeout_ms <= LONGEST_DEADLINE_MS:
        return parts
    return [bytes(part) for part in encode(replace(call, timeout_ms=LONGEST_DEADLINE_MS))]


class _Peer:
    """A stranger's connection to one server, and a client of the same that is well."""

    def __init__(self, transport: ZmqTransport, role: Role, service: Any) -> None:
        settings = ServerLimits(num_threads=2)
        address = f"ipc://@fuzz-{os.getpid()}-{role.name}"
        self.server = serve(transport, address, role, service, settings=settings)
        self.client = Client(transport, address, role, timeout_s=PATIENCE_S)
        self.stranger = RawPeer(address)

    def ask(self, parts: list[bytes]) -> list[bytes] | None:
        """Send a message; returns the answer, or None if it was counted instead."""
        before = self._silent()
        self.stranger.send(parts)
        for _ in range(int(PATIENCE_S / 0.05)):
            if self.stranger.socket.poll(50):
                return self.stranger.socket.recv_multipart()
            if self._silent() != before:
                return None
        raise Finding(f"no answer and no count within {PATIENCE_S} s")

    def _silent(self) -> int:
        counts = self.server.stats()
        return sum(counts.get(name, 0) for name in _SILENT)

    def close(self) -> None:
        self.stranger.close()
        self.client.close()
        self.server.stop()


class Target:
    """A server of each role, configured as by a job."""

    def __init__(self) -> None:
        self._transport = ZmqTransport()
        (store,) = make_servers(1, optimizer=ADAM, capacity=1000)
        self._worker = make_worker(list(make_servers(2, capacity=1000)), forward_buffer_size=50)
        self._inbox = receiver.BatchReceiver(0, 2, 4, 0.1)
        self._peers = [
            _Peer(self._transport, role, service)
            for role, service in (
                (parameter_server(), store),
                (embedding_worker(), self._worker),
                (nn_worker(), self._inbox),
            )
        ]
        self._largest = resident() + LARGEST_GROWTH
        self.num_sent = 0

    def send(self, data: bytes) -> None:
        """Send one input.

        Raises:
            Finding: See above.
        """
        number, parts = from_bytes(data)
        if not parts:
            return
        self.num_sent += 1
        peer = self._peers[number % len(self._peers)]
        answer = peer.ask(with_deadline(parts))
        if answer is not None:
            # One to a peer of another version begins with that version.
            reply = decode([PROTOCOL, *answer[1:]])
            if isinstance(reply, Failure) and reply.body[0] in ("RemoteError", "InternalError"):
                raise Unmeant(reply.body)
        if self.num_sent % 64 == 0:
            self.check()

    def check(self) -> None:
        """Raise a finding unless others are served and memory is bounded."""
        for peer in self._peers:
            peer.client.hello()
            if peer.client.stats().get("lost", 0) or peer.stranger.socket.poll(0):
                raise Finding(f"another client of {peer.server.hello.role} was disturbed")
        if resident() > self._largest:
            raise Finding(f"{resident() >> 20} MiB are resident")

    def close(self) -> None:
        for peer in self._peers:
            peer.close()
        self._worker.close()
        self._transport.close()


@contextlib.contextmanager
def target() -> Iterator[Target]:
    """A target whose polls return at once."""
    before, receiver.POLL_S = receiver.POLL_S, 0.001
    made = Target()
    try:
        yield made
    finally:
        made.close()
        receiver.POLL_S = before


# --- inputs -------------------------------------------------------------------------------


def seeds() -> list[bytes]:
    """One good call of each method, and every bad message the tests know."""
    found = [
        to_bytes(number, _call(role.methods[name], arguments))
        for number, (role, calls) in enumerate(_good_calls())
        for name, arguments in calls
    ]
    short = [parts for _, parts, _ in BAD if sum(map(len, parts)) < 1000]
    return found + [to_bytes(number % 3, parts) for number, parts in enumerate(short)]


def _call(method: Method, arguments: tuple[Any, ...]) -> list[Part]:
    return encode(Call(7, method.name, LONGEST_DEADLINE_MS, *method.write_arguments(arguments)))


def _good_calls() -> list[tuple[Role, list[tuple[str, tuple[Any, ...]]]]]:
    """The calls that the tests of stubs make, and those of a data-loader."""
    (store,) = make_servers(1, hyper=None, optimizer=None)
    worker: Any = make_worker(make_servers(1, hyper=None, optimizer=None))
    with contextlib.closing(worker):
        of_server, of_worker = Faulty(store), Faulty(worker)
        ask_server(of_server)
        ask_worker(of_worker)
    array = np.ones((2, 3), np.float32)
    dense = (m.NamedArray("x", array), m.NamedArray("y", np.zeros(2, np.int64)))
    streamed = m.StreamedBatch(
        0, 2, True, m.RemoteRef(0, 5), dense, dense, np.zeros(2, np.uint8)
    )
    of_rank: list[tuple[str, tuple[Any, ...]]] = [
        ("open_stream", (m.StreamOpening(0, 1, 9, 0),)),
        ("deliver", ((0, 9), streamed)),
        ("relocate", ((0, 9), 0, m.RemoteRef(1, 6))),
        ("poll", ((0, 9), 0)),
        ("end_stream", ((0, 9), 2, "", 1)),
    ]
    common: list[tuple[str, tuple[Any, ...]]] = [
        ("hello", ()),
        ("finish_job", (0, True)),
        ("job_status", ("loader 0",)),
    ]
    return [
        (parameter_server(), common + of_server.calls),
        (embedding_worker(), common + of_worker.calls),
        (nn_worker(), common + of_rank),
    ]


def corpus() -> list[bytes]:
    """The inputs that a fuzzer found to be worth keeping, one a line in base 64."""
    return [base64.b64decode(line) for line in CORPUS.read_text("ascii").split()]
