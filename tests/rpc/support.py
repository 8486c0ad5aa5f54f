"""Transports, a role of its own, and raw peers for the tests of the wire."""

from __future__ import annotations

import builtins
import contextlib
import dataclasses
import inspect
import itertools
import socket as sockets
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import msgpack  # type: ignore[import-untyped]
import numpy as np
import zmq

from persia._core.ids.feature_batch import FeatureBatch
from persia._rpc import messages
from persia._rpc.client import Client
from persia._rpc.frame import PROTOCOL, Call, Failure, Message, Part, Reply, decode, encode
from persia._rpc.messages import TableSigns
from persia._rpc.methods import Hello, embedding_worker, nn_worker, parameter_server, role_of
from persia._rpc.server import Server, ServerLimits, serve
from persia._rpc.zmq_transport import ZmqTransport
from tests.support.waiting import PATIENCE_S

TRANSPORTS = ("ipc", "tcp")


class Wire:
    """A transport, addresses that are free, and what is closed with it, the newest first."""

    def __init__(self, kind: str, directory: Path, **options: Any) -> None:
        self.kind = kind
        self.transport = ZmqTransport(**options)
        self._directory = directory
        self._numbers = itertools.count()
        self._made = contextlib.ExitStack()
        self._made.callback(self.transport.close)

    def address(self) -> str:
        if self.kind == "tcp":
            return "tcp://127.0.0.1:0"
        return f"ipc://{self._directory}/{next(self._numbers)}"

    def serve(self, service: Any, address: str | None = None, **options: Any) -> Server:
        role = options.pop("role", TOY)
        where = address or self.address()
        server = serve(self.transport, where, role, service, **options)
        self._made.callback(server.stop)
        return server

    def serve_toy(
        self, address: str | None = None, **settings: int
    ) -> tuple[Server, ToyService]:
        service = ToyService()
        server = self.serve(service, address, settings=ServerLimits(**settings))
        self._made.callback(service.permits.release, 1000)
        return server, service

    def client(self, server: Server | str, **options: Any) -> Client:
        address = server if isinstance(server, str) else server.address
        values: dict[str, Any] = {"role": TOY, "timeout_s": PATIENCE_S, "replica": 0} | options
        made = Client(self.transport, address, **values)
        return self._made.enter_context(contextlib.closing(made))

    def toy(self, **settings: int) -> tuple[Server, ToyService, Client]:
        """A server, and a client that has met it."""
        server, service = self.serve_toy(None, **settings)
        client = self.client(server)
        client.hello()
        return server, service, client

    def remote(self, stub: Any, service: Any) -> Any:
        """A stub of a server that serves this object."""
        server = self.serve(service, role=stub._role())
        made = stub.connect(self.transport, server.address, timeout_s=PATIENCE_S)
        return self._made.enter_context(contextlib.closing(made))

    def peer(self, server: Server, **options: int) -> RawPeer:
        return self._made.enter_context(raw_peer(server.address, **options))

    def close(self) -> None:
        self._made.close()


class Toy(Protocol):
    """Methods to see calls by."""

    def add(self, number: int) -> int: ...
    def add_once(self, number: int) -> int: ...
    def hold(self, number: int) -> int: ...
    def fail(self, name: str) -> None: ...
    def echo(self, tables: Sequence[TableSigns]) -> tuple[TableSigns, ...]: ...
    def fill(self, num_signs: int) -> TableSigns: ...
    def wrong(self) -> int: ...
    def clear_embeddings(self) -> None: ...  # one that the control key is for


TOY = role_of(
    "toy", Toy, always="add fail echo fill wrong clear_embeddings", never="add_once hold"
)


class ToyService:
    """Implements ``Toy``; ``hold`` waits for a permit."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.total = 0
        self.calls: list[tuple[str, int]] = []
        self.permits = threading.Semaphore(0)
        self.holding = threading.Semaphore(0)  # released by each call that waits

    def add(self, number: int) -> int:
        with self.lock:
            self.total += number
            self.calls.append(("add", number))
            return self.total

    def add_once(self, number: int) -> int:
        return self.add(number)

    def hold(self, number: int) -> int:
        with self.lock:
            self.calls.append(("hold", number))
        self.holding.release()
        if not self.permits.acquire(timeout=PATIENCE_S):
            raise TimeoutError("no permit came")
        return number

    def await_held(self, count: int = 1) -> None:
        """Wait until this number of further calls waits for a permit."""
        for _ in range(count):
            assert self.holding.acquire(timeout=PATIENCE_S)

    def fail(self, name: str) -> None:
        raise getattr(builtins, name)("why")

    def echo(self, tables: Sequence[TableSigns]) -> tuple[TableSigns, ...]:
        return tuple(tables)

    def fill(self, num_signs: int) -> TableSigns:
        return TableSigns(0, np.arange(num_signs, dtype=np.uint64))

    def wrong(self) -> Any:
        return "not an int"

    def clear_embeddings(self) -> None:
        self.total = 0


def place(error: Any) -> tuple[str, int | None, str, str]:
    """Where a ServiceError says that it comes from."""
    return error.role, error.replica, error.address, error.method


def watched(num_bytes: int) -> tuple[np.ndarray[Any, Any], threading.Event]:
    """An array, and what is set when its memory is let go of."""

    class Memory(np.ndarray[Any, Any]):
        """Can be referred to weakly."""

    array, is_gone = np.arange(num_bytes, dtype=np.uint8).view(Memory), threading.Event()
    weakref.finalize(array, is_gone.set)
    return array, is_gone


def same(one: Any, two: Any) -> bool:
    """Bit-equal, of the same types, all the way down."""
    return bool(_content(one) == _content(two))


def _content(value: Any) -> Any:
    if isinstance(value, FeatureBatch):
        return FeatureBatch, value.name, _content(value.parts())
    if isinstance(value, np.ndarray):
        return np.ndarray, value.dtype, value.shape, value.tobytes()
    if isinstance(value, Mapping):
        return {key: _content(one) for key, one in value.items()}
    if dataclasses.is_dataclass(value):
        fields = dataclasses.fields(value)
        kept = [field.name for field in fields if field.compare]
        return type(value), [_content(getattr(value, name)) for name in kept]
    if isinstance(value, (list, tuple)):
        return type(value), [_content(one) for one in value]
    return type(value), value


def message_classes() -> list[Any]:
    """The classes of messages, in the order they are declared."""
    own = [one for one in vars(messages).values() if dataclasses.is_dataclass(one)]
    return [one for one in own if one.__module__ == messages.__name__]


def schema_text() -> str:
    """The fields of every message and method as text, as ``docs/protocol.md`` has it.

    A change of this text is a change of the protocol.
    """

    def declared(hints: Mapping[str, Any]) -> str:
        return ", ".join(f"{name}: {hint}" for name, hint in hints.items() if name != "return")

    lines = [
        f"{cls.__name__}({declared(inspect.get_annotations(cls))})"
        for cls in [*message_classes(), Hello]
    ]
    for name, protocol in (
        ("all", messages.Job),
        (parameter_server().name, messages.ParameterServer),
        (embedding_worker().name, messages.EmbeddingWorker),
        (nn_worker().name, messages.NNWorker),
    ):
        lines.append(f"[{name}]")
        for method, function in inspect.getmembers(protocol, inspect.isfunction):
            if not method.startswith("_"):
                hints = inspect.get_annotations(function)
                lines.append(f"{method}({declared(hints)}) -> {hints['return']}")
    return "\n".join(lines)


@contextlib.contextmanager
def busy(wire: Wire, **settings: int) -> Iterator[tuple[Server, ToyService, Client]]:
    """A server with a call that holds, until a permit comes or this ends."""
    server, service, client = wire.toy(**settings)
    with ThreadPoolExecutor(1) as pool:
        held = pool.submit(client.call, "hold", 1)
        service.await_held()
        yield server, service, client
        service.permits.release()
        assert held.result(PATIENCE_S) == 1
    assert client.call("hello").role == "toy"


def tcp_of(server: Server) -> sockets.socket:
    port = int(server.address.rpartition(":")[2])
    return sockets.create_connection(("127.0.0.1", port), PATIENCE_S)


class RawPeer:
    """A DEALER without our client: sends the given parts."""

    def __init__(self, address: str, **options: int) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket: zmq.Socket[bytes] = self.context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.RCVTIMEO, int(PATIENCE_S * 1000))
        self.socket.setsockopt(zmq.SNDTIMEO, int(PATIENCE_S * 1000))
        for name, value in options.items():
            self.socket.setsockopt(getattr(zmq, name), value)
        self.socket.connect(address)

    def send(self, parts: Sequence[Part]) -> None:
        self.socket.send_multipart(parts)

    def call(self, call_id: int, method: str, *arguments: Any) -> None:
        self.send(encode(Call(call_id, method, 20_000, list(arguments))))

    def receive(self) -> Message:
        return decode(self.socket.recv_multipart())

    def answer(self, call_id: int) -> Reply | Failure:
        """The answer to one call; those to others are dropped."""
        while True:
            message = self.receive()
            assert not isinstance(message, Call)
            if message.call_id == call_id:
                return message

    def settle(self) -> Reply | Failure:
        """Return when the server has taken all that was sent before."""
        self.call(1 << 40, "hello")
        return self.answer(1 << 40)

    def close(self) -> None:
        self.socket.close(linger=0)
        self.context.term()


@contextlib.contextmanager
def raw_peer(address: str, **options: int) -> Iterator[RawPeer]:
    peer = RawPeer(address, **options)
    try:
        yield peer
    finally:
        peer.close()


def header(**changes: Any) -> bytes:
    """A call's header, with some keys changed or, where None is given as ..., left out."""
    content: dict[str, Any] = {"k": "call", "id": 7, "m": "add", "t": 1000, "a": [], "b": [1]}
    content |= changes
    packed: bytes = msgpack.packb({k: v for k, v in content.items() if v is not ...})
    return packed


# Messages with exactly one thing wrong, and the reason that is counted.
# Less than msgpack refuses, and too deep for ``repr``; msgpack itself would not write it.
NESTED = b"\x91" * 1015 + b"\x90"


def nested(**changes: Any) -> bytes:
    """Return a header in which the text MARK is a deeply nested list."""
    return header(**changes).replace(msgpack.packb("MARK"), NESTED)


BAD: list[tuple[str, list[bytes], str]] = [
    ("nested header", [PROTOCOL, NESTED], "header"),
    ("nested id", [PROTOCOL, nested(id="MARK")], "header"),
    ("nested method", [PROTOCOL, nested(m="MARK")], "header"),
    ("nested arrays", [PROTOCOL, nested(a="MARK")], "array_count"),
    ("nested array", [PROTOCOL, nested(a="MARK"), b"12345678"], "array_spec"),
    ("no part", [b""], "parts"),
    ("one part", [PROTOCOL], "parts"),
    ("empty delimiter", [b"", PROTOCOL, header()], "protocol"),
    ("other protocol", [b"GET / HT", b"TP/1.1"], "protocol"),
    ("long name", [b"P" * 100_000, header()], "protocol"),
    ("empty header", [PROTOCOL, b""], "header"),
    ("no msgpack", [PROTOCOL, b"\xc1"], "header"),
    ("cut off", [PROTOCOL, header()[:-1]], "header"),
    ("more behind", [PROTOCOL, header() + b"\x00"], "header"),
    ("not a map", [PROTOCOL, msgpack.packb([1, 2])], "header"),
    ("deep", [PROTOCOL, b"\x91" * 100_000 + b"\xc0"], "header"),
    ("extension", [PROTOCOL, header(b=msgpack.ExtType(4, b"x"))], "header"),
    ("not UTF-8", [PROTOCOL, b"\x81\xa1k\xa2\xff\xfe"], "header"),
    ("unhashable kind", [PROTOCOL, header(k=[1])], "header"),
    ("unknown kind", [PROTOCOL, header(k="cast")], "header"),
    ("missing key", [PROTOCOL, header(t=...)], "header"),
    ("additional key", [PROTOCOL, header(x=1)], "header"),
    ("id is text", [PROTOCOL, header(id="7")], "header"),
    ("id is bool", [PROTOCOL, header(id=True)], "header"),
    ("id is negative", [PROTOCOL, header(id=-1)], "header"),
    ("id is 0", [PROTOCOL, header(id=0)], "header"),
    ("time is float", [PROTOCOL, header(t=1.0)], "header"),
    ("time is long", [PROTOCOL, header(t=1 << 32)], "header"),
    *[(f"replica {r!r}", [PROTOCOL, header(r=r)], "header") for r in (-1, 1 << 32, True, "0")],
    ("method is bytes", [PROTOCOL, header(m=b"add")], "header"),
    ("method is long", [PROTOCOL, header(m="a" * 65)], "header"),
    ("specs are a map", [PROTOCOL, header(a={})], "array_count"),
    ("array missing", [PROTOCOL, header(a=[["<u8", [1]]])], "array_count"),
    ("array too many", [PROTOCOL, header(), b"12345678"], "array_count"),
    ("object dtype", [PROTOCOL, header(a=[["|O", [1]]]), bytes(8)], "array_spec"),
    ("big-endian", [PROTOCOL, header(a=[[">u8", [1]]]), bytes(8)], "array_spec"),
    ("dtype is a list", [PROTOCOL, header(a=[[["<u8"], [1]]]), bytes(8)], "array_spec"),
    ("spec of three", [PROTOCOL, header(a=[["<u8", [1], 0]]), bytes(8)], "array_spec"),
    ("two negatives", [PROTOCOL, header(a=[["<u8", [-1, -1]]]), bytes(8)], "array_spec"),
    ("bool extent", [PROTOCOL, header(a=[["<u8", [True]]]), bytes(8)], "array_spec"),
    ("float extent", [PROTOCOL, header(a=[["<u8", [1.0]]]), bytes(8)], "array_spec"),
    ("huge extent", [PROTOCOL, header(a=[["<u8", [1 << 60]]]), bytes(8)], "array_spec"),
    ("nine axes", [PROTOCOL, header(a=[["<u8", [1] * 9]]), bytes(8)], "array_spec"),
    ("short array", [PROTOCOL, header(a=[["<u8", [2]]]), bytes(15)], "array_bytes"),
    ("long array", [PROTOCOL, header(a=[["<u8", [2]]]), bytes(17)], "array_bytes"),
    ("bytes for nothing", [PROTOCOL, header(a=[["<u8", [0]]]), bytes(1)], "array_bytes"),
    ("bool of 2", [PROTOCOL, header(a=[["|b1", [1]]]), b"\x02"], "array_bytes"),
]
