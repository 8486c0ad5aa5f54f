"""Our calls, with and without keys, against bare pyzmq doing the same exchange, interleaved.

    python -m tests.benchmarks.wire [--quick] [--transports ipc tcp]

A server process answers each message with the arrays that came: as a ``Server``, as one whose
connections are encrypted, and as a ROUTER in a loop; this process asks all three in turn. For
each size of array it prints the medians over repetitions: calls a second, and seconds of CPU
both processes took for a call; a ratio is taken within a repetition, where all met the same
load.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import zmq

from persia._rpc.client import Client
from persia._rpc.curve import make_keys
from persia._rpc.messages import AnyArray, NamedArray
from persia._rpc.methods import role_of
from persia._rpc.server import serve
from persia._rpc.zmq_transport import ZmqTransport
from tests.benchmarks.interleaved import interleave, parser, ratio, row, table

TRANSPORTS = ("ipc", "tcp")
CONTENDERS = ("ours", "keys", "bare")
WARM_UP = 16


@dataclass(frozen=True)
class Load:
    """Arrays of one size, a number of calls at a time."""

    title: str
    num_bytes: int
    in_flight: int
    num_calls: int
    is_threaded: bool = False  # ours by as many threads; else by one, as bare pyzmq


LOADS = (
    Load("100 kB, one at a time", 100_000, 1, 1500),
    Load("100 kB, 4 in flight", 100_000, 4, 2000),
    Load("1 MiB, 4 in flight", 1 << 20, 4, 600),
    Load("8 MiB, 4 in flight", 8 << 20, 4, 80),
    Load("100 kB, 4 threads", 100_000, 4, 2000, is_threaded=True),
    Load("1 MiB, 4 threads", 1 << 20, 4, 600, is_threaded=True),
)


class Echo(Protocol):
    """What is measured, and what the server process has used."""

    def echo(self, named: NamedArray) -> NamedArray: ...
    def cpu_seconds(self) -> float: ...


ECHO = role_of("echo", Echo, always="echo cpu_seconds")


class EchoService:
    def echo(self, named: NamedArray) -> NamedArray:
        return named

    def cpu_seconds(self) -> float:
        return cpu_seconds()


def cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


# --- the server process -------------------------------------------------------------------


def answer(socket: zmq.Socket[bytes]) -> None:
    """Bare pyzmq's server: arrays come, and arrays go back."""
    with contextlib.suppress(zmq.ContextTerminated):
        while True:
            *head, part = socket.recv_multipart(copy=False)
            array = np.frombuffer(part.buffer, np.uint32)
            socket.send_multipart([*head, array.data], copy=False)
    socket.close(linger=0)


def run_server(directory: Path, addresses: dict[str, str]) -> None:
    """Serve until the standard input ends."""
    transports = {"ours": ZmqTransport(), "keys": ZmqTransport(keys=directory)}
    servers = {
        name: serve(transport, addresses[name], ECHO, EchoService())
        for name, transport in transports.items()
    }
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.bind(addresses["bare"])
    endpoint = router.getsockopt_string(zmq.LAST_ENDPOINT)
    thread = threading.Thread(target=answer, args=(router,), daemon=True)
    thread.start()
    bound = {name: server.address for name, server in servers.items()}
    print(json.dumps({**bound, "bare": endpoint}), flush=True)
    sys.stdin.read()
    for name, server in servers.items():
        server.stop()
        transports[name].close()
    context.term()
    thread.join()


@contextlib.contextmanager
def server_process(kind: str, directory: Path) -> Iterator[dict[str, str]]:
    """Start the server process; gives the addresses by contender."""
    asked = {
        name: f"ipc://{directory}/{name}" if kind == "ipc" else "tcp://127.0.0.1:0"
        for name in CONTENDERS
    }
    command = [sys.executable, "-m", "tests.benchmarks.wire"]
    command += ["--serve", str(directory), json.dumps(asked)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())
        process.stdin.close()


# --- the client process -------------------------------------------------------------------


def bare_calls(socket: zmq.Socket[bytes], array: AnyArray, load: Load, num_calls: int) -> None:
    """Ask so often, ``in_flight`` at a time."""
    parts: list[Any] = [b"head", array]
    for _ in range(min(load.in_flight, num_calls)):
        socket.send_multipart(parts, copy=False)
    for number in range(num_calls):
        (_, part) = socket.recv_multipart(copy=False)
        assert np.frombuffer(part.buffer, np.uint32).nbytes == load.num_bytes
        if number + load.in_flight < num_calls:
            socket.send_multipart(parts, copy=False)


def our_calls(client: Client, array: AnyArray, load: Load, num_calls: int) -> None:
    """The same, as an embedding-worker asks its servers."""
    begun = deque(
        client.begin("echo", NamedArray("", array))
        for _ in range(min(load.in_flight, num_calls))
    )
    for number in range(num_calls):
        # Not kept: the next one comes into the same memory, as it does with bare pyzmq.
        assert begun.popleft().result().array.nbytes == load.num_bytes
        if number + load.in_flight < num_calls:
            begun.append(client.begin("echo", NamedArray("", array)))


def calls_of_threads(
    client: Client, pool: ThreadPoolExecutor, array: AnyArray, load: Load, num_calls: int
) -> None:
    """Ask so often, by ``in_flight`` threads that each wait for their answer."""

    def ask(times: int) -> None:
        for _ in range(times):
            # Not kept: the next one comes into the same memory, as it does with bare pyzmq.
            assert client.call("echo", NamedArray("", array)).array.nbytes == load.num_bytes

    list(pool.map(ask, [num_calls // load.in_flight] * load.in_flight))


def measure(
    asks: dict[str, Callable[[int], None]],
    times: int,
    num_calls: int,
    cpu: Callable[[], float],
) -> list[object]:
    """Run all in turn; returns the cells of a row, medians over the repetitions."""
    used: dict[str, list[float]] = {name: [] for name in asks}

    def turn(name: str) -> float:
        asks[name](WARM_UP)
        before, start = cpu(), time.perf_counter()
        asks[name](num_calls)
        rate = num_calls / (time.perf_counter() - start)
        used[name].append((cpu() - before) / num_calls * 1e6)
        return rate

    series = interleave({name: functools.partial(turn, name) for name in asks}, times, warm=0)
    return [
        *(f"{series[name].rate:.0f}" for name in CONTENDERS),
        ratio(series["ours"], series["bare"]),
        ratio(series["keys"], series["ours"]),
        *(f"{statistics.median(used[name]):.0f}" for name in CONTENDERS),
    ]


def measure_transport(kind: str, times: int, share: float) -> None:
    """Print a row for every load over one transport."""
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        make_keys(directory)
        places = stack.enter_context(server_process(kind, directory))
        pool = stack.enter_context(ThreadPoolExecutor(max(load.in_flight for load in LOADS)))
        context = stack.enter_context(zmq.Context())
        dealer = stack.enter_context(context.socket(zmq.DEALER))
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.connect(places["bare"])
        clients = {}
        for name, keys in (("ours", None), ("keys", directory)):
            transport = ZmqTransport(keys=keys)
            stack.callback(transport.close)
            clients[name] = Client(transport, places[name], ECHO, timeout_s=60.0)
            stack.callback(clients[name].close)
        for load in LOADS:
            array = np.arange(load.num_bytes // 4, dtype=np.uint32)
            num_calls = max(2 * WARM_UP, int(load.num_calls * share)) // 16 * 16
            asks: dict[str, Callable[[int], None]] = {
                name: functools.partial(calls_of_threads, client, pool, array, load)
                if load.is_threaded
                else functools.partial(our_calls, client, array, load)
                for name, client in clients.items()
            }
            asks["bare"] = functools.partial(bare_calls, dealer, array, load)
            cpu = lambda: cpu_seconds() + clients["ours"].call("cpu_seconds")  # noqa: E731
            row(kind, load.title, *measure(asks, times, num_calls, cpu))


def main() -> None:
    options = parser(__doc__, 9)
    options.add_argument("--transports", nargs="+", choices=TRANSPORTS, default=[*TRANSPORTS])
    options.add_argument("--repetitions", dest="pairs", type=int, help="the same as --pairs")
    options.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    args = options.parse_args()
    if args.serve:
        run_server(Path(args.serve[0]), json.loads(args.serve[1]))
        return
    table(
        "Calls that return their array, against bare pyzmq ROUTER/DEALER",
        *("transport", "load", "calls/s", "with keys", "bare", "times bare [95 %]"),
        *("keys / without [95 %]", "CPU us a call", "with keys", "bare"),
    )
    for kind in args.transports:
        measure_transport(kind, args.pairs or 9, 0.1 if args.quick else 1.0)


if __name__ == "__main__":
    main()
