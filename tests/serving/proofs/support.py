"""Processes of a proof, a client that knows every number, and the table that is printed."""

from __future__ import annotations

import http.client
import itertools
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.serving.proofs.trainer import DIM, FEATURES, MODEL
from tests.support.processes import ROOT
from tests.support.waiting import until

# Seconds for a process to be there: torch loads slowly where much else runs.
START_S = 240.0
CANDIDATES = 100


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


class Trainer:
    """The child that trains; ``steps`` and ``began`` are of the steps that it reported."""

    def __init__(self, folder: Path, *words: str) -> None:
        self.events: list[dict[str, Any]] = []
        self._log = (folder / "trainer.log").open("a")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.serving.proofs.trainer", str(folder), *words],
            cwd=ROOT,
            env=environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                self.events.append(json.loads(line))

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def wait_for(self, did: str, count: int = 1, patience_s: float = START_S) -> None:
        """Wait until it has reported this number of them."""
        until(lambda: self.count(did) >= count or self.process.poll() is not None, patience_s)
        assert self.count(did) >= count, Path(self._log.name).read_text()[-3000:]

    def count(self, did: str) -> int:
        return sum(one["did"] == did for one in self.events)

    def kill(self) -> None:
        """Kill it, at once."""
        self.process.kill()
        self.stop()

    def stop(self) -> None:
        with suppress(OSError, ValueError):
            self.tell("end")
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
        self._reader.join(10)
        for pipe in (self.process.stdin, self.process.stdout):
            with suppress(OSError):  # of a training that was killed
                if pipe is not None:
                    pipe.close()
        self._log.close()


class ServeProcess:
    """``persia-launcher serve`` in a process; the ports stay if it is started again."""

    def __init__(
        self,
        folder: Path,
        *words: str,
        name: str = "serve",
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self._folder, self._words = folder, words
        self._name, self._variables = name, dict(variables or {})
        self.http_port, self.grpc_port, self._number = 0, 0, 0
        self.start()

    def start(self) -> None:
        self._number += 1
        path = self._folder / f"{self._name}-{self._number}.log"
        self.log = path
        with path.open("w") as file:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "persia.launcher", "serve"),
                    *(str(self._folder / "models"), "--poll", "0.2", "--record-every", "0"),
                    *("--http-port", str(self.http_port), "--grpc-port", str(self.grpc_port)),
                    *self._words,
                ],
                cwd=ROOT,
                env=environment() | self._variables,
                stdout=file,
                stderr=file,
            )

    def wait(self) -> None:
        """Wait until it is ready."""
        found: list[re.Match[str]] = []

        def has_said() -> bool:
            said = re.search(r"serving at http://\S+:(\d+), gRPC at \S+:(\d+)", self.printed())
            found.extend([said] if said else [])
            return bool(found) or self.process.poll() is not None

        until(has_said, START_S)
        assert found, self.printed()
        self.http_port, self.grpc_port = int(found[0][1]), int(found[0][2])
        until(self.is_ready, START_S, details=self.printed)

    def is_ready(self) -> bool:
        with (
            suppress(OSError, http.client.HTTPException),
            closing(
                http.client.HTTPConnection("127.0.0.1", self.http_port, timeout=10)
            ) as asked,
        ):
            asked.request("GET", "/v2/health/ready")
            return asked.getresponse().status == 200
        return False

    def printed(self) -> str:
        return self.log.read_text()

    def memory(self) -> int:
        """Return the bytes that it has resident."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return 1024 * int(re.search(r"VmRSS:\s+(\d+)", status)[1])  # type: ignore[index]

    def kill(self) -> None:
        """Kill it, at once."""
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(40)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


def binary_body(inputs: dict[str, NDArray[Any]]) -> tuple[bytes, dict[str, str]]:
    """Return the body of a request with binary tensors both ways, and its headers."""
    names = {"i": "INT", "u": "UINT", "f": "FP"}
    tensors = [
        {
            "name": name,
            "shape": list(one.shape),
            "datatype": f"{names[one.dtype.kind]}{8 * one.dtype.itemsize}",
            "parameters": {"binary_data_size": one.nbytes},
        }
        for name, one in inputs.items()
    ]
    said = {"inputs": tensors, "parameters": {"binary_data_output": True}}
    head = json.dumps(said).encode()
    data = b"".join([head, *(np.ascontiguousarray(one).tobytes() for one in inputs.values())])
    return data, {"Inference-Header-Content-Length": str(len(head))}


class Connection:
    """One connection, for binary requests to a model."""

    def __init__(self, port: int, model: str = MODEL, timeout_s: float = 30.0) -> None:
        self._path = f"/v2/models/{model}/infer"
        self._http = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout_s)
        self._http.connect()
        self._http.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def ask(self, body: bytes, headers: dict[str, str]) -> tuple[int, NDArray[np.float32]]:
        """Return version and the first output; RuntimeError for a refusal."""
        self._http.request("POST", self._path, body, headers)
        reply = self._http.getresponse()
        data = reply.read()
        if reply.status != 200:
            raise RuntimeError(f"{reply.status} {data[:300]!r}")
        size = int(reply.headers["Inference-Header-Content-Length"])
        head = json.loads(data[:size])
        values = np.frombuffer(data[size:], np.float32)
        return int(head["model_version"]), values.reshape(head["outputs"][0]["shape"])

    def close(self) -> None:
        self._http.close()


@dataclass
class Seen:
    """Answers of one client, in order."""

    versions: list[int] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)  # that the rows have
    began: list[float] = field(default_factory=list)
    ended: list[float] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    mixed: list[str] = field(default_factory=list)
    zeros: list[str] = field(default_factory=list)

    def check(self, version: int, values: NDArray[np.float32], cut: float | None) -> None:
        """Compare an answer to the one that its version and one moment of rows have."""
        rows = values[:, 1:] / DIM
        if (rows == 0).any():
            self.zeros.append(f"version {version}: {np.unique(rows).tolist()}")
        here = float(rows.flat[0])
        faults = []
        if not (rows == here).all() or here != int(here):
            faults.append(f"rows of steps {np.unique(rows).tolist()}")
        if cut is not None and not (values[:, 0] == cut).all():
            faults.append(f"parameter {np.unique(values[:, 0]).tolist()}, expected {cut}")
        if cut is not None and here < cut:
            faults.append(f"rows of step {here}, before its cut {cut}")
        if self.steps and here < self.steps[-1]:
            faults.append(f"rows of step {here} after those of {self.steps[-1]}")
        if faults:
            self.mixed.append(f"version {version}: {'; '.join(faults)}")
        self.versions.append(version)
        self.steps.append(here)


def requests_of(num_ids: int, count: int = 64) -> Iterator[tuple[bytes, dict[str, str]]]:
    """Return bodies that ask for one user and many candidates, again and again."""
    rng = np.random.default_rng(3)
    made = []
    for _ in range(count):
        inputs: dict[str, Any] = {
            name: rng.integers(0, num_ids, CANDIDATES) for name in FEATURES
        }
        inputs[FEATURES[0]] = inputs[FEATURES[0]][:1]
        inputs["dense"] = np.zeros((CANDIDATES, 1), np.float32)
        made.append(binary_body(inputs))
    return itertools.cycle(made)


class Cuts:
    """Steps after which each version was cut, as its own file says."""

    def __init__(self, folder: Path) -> None:
        self._models, self._found = folder / "models" / MODEL, {0: 0.0}

    def __getitem__(self, version: int) -> float:
        if version not in self._found:
            path = self._models / str(version) / "persia-model.json"
            self._found[version] = float(json.loads(path.read_text())["model"]["step"])
        return self._found[version]


class Clients:
    """Threads that check what they get; they ask without a pause, or ``rate`` times a second.

    With a rate a request begins when it was due, however long those before it took: what a
    server that stands still does to all who come meanwhile is seen.
    """

    def __init__(
        self,
        port: Callable[[], int],
        cuts: Cuts,
        num_ids: int,
        count: int,
        repeats: bool,
        rate: float | None = None,
    ) -> None:
        self._port, self._cuts, self._repeats = port, cuts, repeats
        self._pause_s = None if rate is None else count / rate
        self._end = threading.Event()
        self.seen = [Seen() for _ in range(count)]
        self.waits_s = 0.0
        self._threads = [
            threading.Thread(
                target=self._ask,
                args=(seen, requests_of(num_ids), time.monotonic() + number * self._first_s()),
            )
            for number, seen in enumerate(self.seen)
        ]
        for thread in self._threads:
            thread.start()

    def _first_s(self) -> float:
        """Return the seconds between the first requests of two threads."""
        return 0.0 if self._pause_s is None else self._pause_s / len(self.seen)

    def _ask(
        self, seen: Seen, bodies: Iterator[tuple[bytes, dict[str, str]]], due: float
    ) -> None:
        connection: Connection | None = None
        while not self._end.is_set():
            began = time.monotonic()
            if self._pause_s is not None:  # paced: requests are due at a rate
                if self._end.wait(max(0.0, due - began)):
                    break
                began, due = due, due + self._pause_s
            try:
                connection = connection or Connection(self._port())
                version, values = connection.ask(*next(bodies))
                ended = time.monotonic()
                seen.check(version, values, self._cuts[version])
            except (OSError, http.client.HTTPException, RuntimeError) as error:
                seen.failed.append(f"{error!r}")
                if connection is not None:
                    connection.close()
                connection = None
                if not self._repeats and len(seen.failed) > 100:
                    return
                self._end.wait(0.01)
                continue
            seen.began.append(began)
            seen.ended.append(ended)
        if connection is not None:
            connection.close()

    def count(self) -> int:
        return sum(len(one.ended) for one in self.seen)

    def wait_until(
        self, is_so: Callable[[], bool], patience_s: float = 3600.0, *, look_s: float = 0.02
    ) -> None:
        """Wait until it is so; an error if no client is left."""
        until(
            lambda: is_so() or not any(t.is_alive() for t in self._threads),
            patience_s,
            look_s=look_s,
        )
        if not is_so():
            raise AssertionError("no client is left to wait for")

    def stop(self) -> None:
        self._end.set()
        for thread in self._threads:
            thread.join(60)

    def faults(self, kind: str) -> list[str]:
        return [one for seen in self.seen for one in getattr(seen, kind)]

    def milliseconds(self, spans: list[tuple[float, float]]) -> NDArray[np.float64]:
        """Return what requests that overlapped these spans of time took."""
        found = []
        for seen in self.seen:
            began, ended = np.array(seen.began), np.array(seen.ended)
            size = min(len(began), len(ended))
            began, ended = began[:size], ended[:size]
            inside = np.zeros(size, bool)
            for first, last in spans:
                inside |= (ended >= first) & (began <= last)
            found.append(1e3 * (ended - began)[inside])
        return np.concatenate(found) if found else np.zeros(0)


def percentile(values: NDArray[np.float64], q: float) -> float:
    return float(np.percentile(values, q)) if len(values) else float("nan")


class Lines:
    """The lines of a proof, each with the bound that it has to hold."""

    def __init__(self, title: str, judges_times: bool) -> None:
        print(title)
        self._judges_times, self._fails = judges_times, 0

    def show(self, name: str, measured: str, bound: str = "", *, holds: bool = True) -> None:
        """Print a line; one that does not hold fails the proof."""
        self._fails += not holds
        mark = "" if not bound else "ok" if holds else "FAILS"
        print(f"  {name:<44} {measured:>22}   {bound:<20} {mark}".rstrip(), flush=True)

    def show_time(self, name: str, value: float, unit: str, bound: float) -> None:
        """Print a time or a ratio of times; short runs on busy machines do not judge it."""
        text = f"at most {bound:g} {unit}".rstrip()
        if self._judges_times:
            # Not a number is no time below the bound.
            self.show(name, f"{value:.3f} {unit}".rstrip(), text, holds=value <= bound)
        else:
            self.show(name, f"{value:.3f} {unit} (not judged: {text})".strip())

    def show_none(self, name: str, faults: list[str], of: str = "") -> None:
        """Print how many faults there were, and the first; none is right."""
        self.show(name, f"{len(faults)}{of}", "0", holds=not faults)
        for one in faults[:3]:
            print(f"      {one[:300]}", flush=True)

    def end(self) -> int:
        return 1 if self._fails else 0


@contextmanager
def deployment(
    folder: Path, rows: int, flush_s: float, *words: str
) -> Iterator[tuple[Trainer, ServeProcess]]:
    """Train, publish a first version and serve it."""
    trainer = Trainer(folder, "--rows", str(rows), "--flush", str(flush_s))
    server: ServeProcess | None = None
    try:
        trainer.wait_for("begin")
        trainer.tell("step")
        trainer.wait_for("step")
        trainer.tell("publish")
        wait_for_version(folder, 1)
        server = ServeProcess(folder, *words)
        server.wait()
        yield trainer, server
    finally:
        if server is not None:
            server.stop()
        trainer.stop()


def wait_for_version(folder: Path, version: int) -> None:
    path = folder / "models" / MODEL / str(version) / "persia-model.json"

    def why() -> str:
        return (folder / "trainer.log").read_text()[-2000:]

    until(path.exists, START_S, details=why)
