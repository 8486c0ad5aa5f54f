"""Our calls against bare pyzmq doing the same exchange, interleaved in one run.

    python -m tests.benchmarks.wire [--quick] [--transports ipc tcp]

A server process answers each message with the arrays that came, once as a ``Server`` and once
as a ROUTER in a loop; this process asks both in turn. Prints for each size of array the medians
over repetitions: calls a second, seconds of CPU both processes took for a call, and what bare
pyzmq does; a ratio is taken within a repetition, where both met the same load.
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
from persia._rpc.messages import AnyArray, NamedArray
from persia._rpc.methods import role_of
from persia._rpc.server import serve
from persia._rpc.zmq_transport import ZmqTransport

TRANSPORTS = ("ipc", "tcp")
WARM_UP = 16


@dataclass(frozen=True)
class Load:
    """Arrays of so many bytes, so many calls at a time."""

    title: str
    num_bytes: int
    in_flight: int
    num_calls: int
    is_threaded: bool = False  # ours by so many threads; else by one, as bare pyzmq


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


ECHO = role_of("echo", Echo, dict.fromkeys(("echo", "cpu_seconds"), lambda arguments: True))


class EchoService:
    """Implements ``Echo``."""

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


def run_server(ours: str, bare: str) -> None:
    """Serve until the standard input ends."""
    transport = ZmqTransport()
    server = serve(transport, ours, ECHO, EchoService())
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.bind(bare)
    endpoint = router.getsockopt_string(zmq.LAST_ENDPOINT)
    thread = threading.Thread(target=answer, args=(router,), daemon=True)
    thread.start()
    print(json.dumps([server.address, endpoint]), flush=True)
    sys.stdin.read()
    server.stop()
    transport.close()
    context.term()
    thread.join()


@contextlib.contextmanager
def server_process(kind: str, directory: Path) -> Iterator[tuple[str, str]]:
    """Start the server process; gives the addresses of ours and of the bare one."""
    asked = [
        f"ipc://{directory}/{name}" if kind == "ipc" else "tcp://127.0.0.1:0"
        for name in ("ours", "bare")
    ]
    command = [sys.executable, "-m", "tests.benchmarks.wire", "--serve", *asked]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        ours, bare = json.loads(process.stdout.readline())
        yield ours, bare
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
    """Ask so often, ``in_flight`` at a time, as an embedding-worker asks its servers."""
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


@dataclass(frozen=True)
class Cell:
    """One load over one transport; medians over the repetitions."""

    transport: str
    load: str
    calls_per_s: float
    bare_calls_per_s: float
    to_bare: float
    worst_to_bare: float
    best_to_bare: float
    cpu_us_per_call: float
    bare_cpu_us_per_call: float


def measure(
    kind: str, load: Load, ours: Callable[[int], None], bare: Callable[[int], None], **how: Any
) -> Cell:
    """Run both in turn, another one first each time."""
    rates: dict[str, list[float]] = {"ours": [], "bare": []}
    used: dict[str, list[float]] = {"ours": [], "bare": []}
    functions = {"ours": ours, "bare": bare}
    for repetition in range(how["times"]):
        names = ("ours", "bare") if repetition % 2 else ("bare", "ours")
        for name in names:
            functions[name](WARM_UP)
            cpu, start = how["cpu"](), time.perf_counter()
            functions[name](how["num_calls"])
            rates[name].append(how["num_calls"] / (time.perf_counter() - start))
            used[name].append((how["cpu"]() - cpu) / how["num_calls"] * 1e6)
    ratios = np.divide(rates["ours"], rates["bare"]).tolist()
    return Cell(
        kind,
        load.title,
        statistics.median(rates["ours"]),
        statistics.median(rates["bare"]),
        statistics.median(ratios),
        min(ratios),
        max(ratios),
        statistics.median(used["ours"]),
        statistics.median(used["bare"]),
    )


def measure_transport(kind: str, times: int, share: float) -> list[Cell]:
    """Measure every load over one transport."""
    cells = []
    with (
        tempfile.TemporaryDirectory() as directory,
        server_process(kind, Path(directory)) as (ours, bare),
        ThreadPoolExecutor(max(load.in_flight for load in LOADS)) as pool,
        zmq.Context() as context,
        context.socket(zmq.DEALER) as dealer,
    ):
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.connect(bare)
        transport = ZmqTransport()
        client = Client(transport, ours, ECHO, timeout_s=60.0)
        for load in LOADS:
            array = np.arange(load.num_bytes // 4, dtype=np.uint32)
            num_calls = max(2 * WARM_UP, int(load.num_calls * share)) // 16 * 16
            ours_now = (
                functools.partial(calls_of_threads, client, pool, array, load)
                if load.is_threaded
                else functools.partial(our_calls, client, array, load)
            )
            cells.append(
                measure(
                    kind,
                    load,
                    ours_now,
                    functools.partial(bare_calls, dealer, array, load),
                    times=times,
                    num_calls=num_calls,
                    cpu=lambda: cpu_seconds() + client.call("cpu_seconds"),
                )
            )
        client.close()
        transport.close()
    return cells


def wire(quick: bool, transports: list[str], times: int) -> list[Cell]:
    """Measure every load over every transport and print the table."""
    cells = []
    for kind in transports:
        print(f"measuring the wire over {kind}", file=sys.stderr)
        cells += measure_transport(kind, times, 0.1 if quick else 1.0)
    print("\nCalls that return their array, against bare pyzmq ROUTER/DEALER\n")
    print("| transport | load | calls/s | bare | times bare (range) | CPU us a call | bare |")
    print("|---|---|---|---|---|---|---|")
    for cell in cells:
        print(
            f"| {cell.transport} | {cell.load} | {cell.calls_per_s:.0f} "
            f"| {cell.bare_calls_per_s:.0f} "
            f"| {cell.to_bare:.2f} ({cell.worst_to_bare:.2f}..{cell.best_to_bare:.2f}) "
            f"| {cell.cpu_us_per_call:.0f} | {cell.bare_cpu_us_per_call:.0f} |"
        )
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a tenth of the calls")
    parser.add_argument("--transports", nargs="+", choices=TRANSPORTS, default=[*TRANSPORTS])
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        run_server(*args.serve)
    else:
        wire(args.quick, args.transports, args.repetitions)


if __name__ == "__main__":
    main()
