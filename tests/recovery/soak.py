"""Kill a server at random moments under load, and count every update afterwards.

    python -m tests.recovery.soak KILLS [SEED]

A shadow model counts, for each sign, the updates that were acknowledged. Rows begin at zero and
an update takes 1 off each of them at rate 1, so a row's value says how often it was stepped:
less is an update lost, more is one applied twice. The server is killed with SIGKILL and started
again, as a supervisor does; clients know nothing of it and only repeat what was not answered.
"""

from __future__ import annotations

import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from persia._rpc.messages import (
    HyperParameters,
    InitializationSettings,
    LookupRequest,
    OptimizerSettings,
    TableGradients,
    TableSigns,
    UpdateRequest,
)
from persia._rpc.remote import RemoteParameterServer
from persia._services.addresses import connect_parameter_servers
from persia.errors import ServiceError
from tests.e2e.support import PATIENCE_S, Job, short_directory, transport

S = TypeVar("S")
T = TypeVar("T")

SERVER = "embedding-parameter-server"
CONFIG = """
slots_config:
  one: {dim: 16}
  two: {dim: 32}
"""
LIMIT = "embedding_parameter_server_config: {memory_limit: 64MiB}"
DIMS = (16, 32)
NUM_SIGNS = 30_000
BATCH = 6_000
NUM_CLIENTS = 3
SETTINGS = HyperParameters(InitializationSettings("constant", {"value": 0.0}), 1.0, 1e9, 3)
SGD = OptimizerSettings("sgd", {"lr": 1.0})


def signs_of(table: int) -> NDArray[np.uint64]:
    group = np.uint64(table + 1) << np.uint64(56)
    signs: NDArray[np.uint64] = np.arange(NUM_SIGNS, dtype=np.uint64) | group
    return signs


class Client(threading.Thread):
    """Trains, and counts what was acknowledged; it repeats a call until it is answered."""

    def __init__(self, number: int, addresses: list[str], seed: int) -> None:
        super().__init__(name=f"client-{number}")
        self.number = number
        self.addresses = addresses
        self.random = np.random.default_rng((seed, number))
        self.counts = np.zeros((len(DIMS), NUM_SIGNS), np.int64)
        self.num_updates = self.num_repeated = 0
        self.stopping = threading.Event()
        self.failure: BaseException | None = None

    def run(self) -> None:
        try:
            with transport() as made:
                (server,) = connect_parameter_servers(
                    made,
                    addresses=self.addresses,
                    timeout_s=PATIENCE_S,
                    on_restart=lambda number: None,
                )
                while not self.stopping.is_set():
                    self.step(server)
                server.close()
        except BaseException as error:
            self.failure = error

    def step(self, server: RemoteParameterServer) -> None:
        number = self.num_updates
        places = [self.random.permutation(NUM_SIGNS)[:BATCH] for _ in DIMS]
        signs = [signs_of(table)[at] for table, at in enumerate(places)]
        asked = tuple(TableSigns(table, part) for table, part in enumerate(signs))
        request = LookupRequest(number, True, asked)
        hints = [part.hints for part in self.call(server.lookup, request).tables]
        gradients = tuple(
            TableGradients(table, signs[table], hints[table], np.ones((BATCH, dim), np.float32))
            for table, dim in enumerate(DIMS)
        )
        reply = self.call(server.update, UpdateRequest((self.number, number), gradients))
        assert reply.num_missing == 0, reply
        self.num_repeated += reply.repeated
        for table, at in enumerate(places):
            self.counts[table, at] += 1
        self.num_updates += 1

    def call(self, method: Callable[[S], T], request: S) -> T:
        while True:
            try:
                return method(request)
            except ServiceError:
                if self.stopping.is_set():
                    raise


@contextmanager
def job() -> Iterator[Job]:
    with (
        tempfile.TemporaryDirectory(prefix="persia-soak-", dir="/dev/shm") as rows,
        short_directory() as directory,
    ):
        made = Job(directory)
        made.script("slots.yml", CONFIG)
        made.environment |= {
            "PERSIA_STATE_DIRECTORY": rows,
            "PERSIA_GLOBAL_CONFIG": made.script("global.yml", LIMIT),
            "OPENBLAS_NUM_THREADS": "1",
        }
        yield made
        made.close()


def soak(num_kills: int, seed: int, show: bool = False) -> str:
    """Kill the server so many times; returns what happened.

    Raises:
        AssertionError: If a row does not show the updates that were acknowledged.
    """
    moments = random.Random(seed)
    with job() as made, transport() as wire:
        addresses = made.addresses["PERSIA_EMBEDDING_PARAMETER_SERVERS"].split(",")
        server = made.start_server(SERVER)
        (remote,) = connect_parameter_servers(
            wire, addresses=addresses, timeout_s=PATIENCE_S, on_restart=lambda number: None
        )
        remote.configure(SETTINGS)
        remote.register_optimizer(SGD)
        server.wait_for("serves at")
        clients = [Client(number, addresses, seed) for number in range(NUM_CLIENTS)]
        for client in clients:
            client.start()
        begin = time.monotonic()
        never = threading.Event()
        cut_short = 0
        for kill in range(num_kills):
            done = sum(client.num_updates for client in clients)
            while sum(client.num_updates for client in clients) == done:
                assert not any(client.failure for client in clients)
                never.wait(0.005)
            never.wait(moments.uniform(0.0, 0.2))
            server.signal(signal.SIGKILL)
            server.wait()
            server = made.start_server(SERVER)
            server.wait_for("serves at")
            printed = server.printed()
            assert "of a process that ended, after" in printed, printed
            cut_short += " 0 updates were cut short" not in printed
            if show and kill % 10 == 9:
                print(kill + 1, sum(c.num_updates for c in clients), cut_short, flush=True)
        for client in clients:
            client.stopping.set()
        for client in clients:
            client.join(PATIENCE_S)
            if client.failure is not None:
                raise client.failure
        counts = np.sum([client.counts for client in clients], axis=0)
        for table, dim in enumerate(DIMS):
            (entries,) = remote.read_embedding((TableSigns(table, signs_of(table)),))
            held = np.zeros((NUM_SIGNS, dim), np.float32)
            held[(entries.signs & np.uint64(2**32 - 1)).astype(np.int64)] = -entries.values
            wrong = np.flatnonzero((held != counts[table][:, None]).any(axis=1))
            assert len(wrong) == 0, (held[wrong[:5]], counts[table][wrong[:5]])
        remote.close()
        return (
            f"{num_kills} kills in {time.monotonic() - begin:.0f} s: "
            f"{sum(client.num_updates for client in clients)} updates acknowledged, "
            f"{sum(client.num_repeated for client in clients)} of them repeated after their "
            f"outcome was known, {cut_short} kills in the middle of one; "
            f"every row is as often stepped as it was acknowledged"
        )


if __name__ == "__main__":
    print(soak(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 1, show=True))
