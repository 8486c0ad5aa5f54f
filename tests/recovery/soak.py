"""Kill any server at random moments under load, and count every update afterwards.

    python -m tests.recovery.soak KILLS [SEED]

A shadow model counts, for each sign, the updates that were acknowledged. Rows begin at zero and
an update takes 1 off each of them at rate 1, so a row's value says how often it was stepped:
less is an update lost, more is one applied twice. One of the servers, by chance, is killed with
SIGKILL and started again, as a supervisor does; clients know nothing of it and only repeat what
was not answered.
"""

from __future__ import annotations

import random
import re
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from persia._core.base.hashing import mix64_array, owners
from persia._rpc.messages import (
    LookupRequest,
    TableGradients,
    TableSigns,
    UpdateRequest,
)
from persia._rpc.stubs import RemoteParameterServer
from persia.errors import ServiceError
from tests.cluster.place import Place
from tests.load.parts import SETTINGS, SGD
from tests.support.processes import Cluster
from tests.support.waiting import PATIENCE_S, until

S = TypeVar("S")
T = TypeVar("T")

SERVER = "embedding-parameter-server"
DIMS = (16, 32)
CONFIG = {"slots_config": {"one": {"dim": DIMS[0]}, "two": {"dim": DIMS[1]}}}
LIMIT = {"embedding_parameter_server_config": {"memory_limit": "64MiB"}}
NUM_SIGNS = 30_000
BATCH = 6_000
NUM_CLIENTS = 3
NUM_SERVERS = 2
MOST_BETWEEN = 6  # updates between two kills


def signs_of(table: int) -> NDArray[np.uint64]:
    group = np.uint64(table + 1) << np.uint64(56)
    signs: NDArray[np.uint64] = np.arange(NUM_SIGNS, dtype=np.uint64) | group
    return signs


def owned(signs: NDArray[np.uint64], server: int) -> NDArray[np.bool_]:
    """Which of the signs are one server's."""
    mine: NDArray[np.bool_] = owners(NUM_SERVERS)[mix64_array(signs) >> np.uint64(50)] == server
    return mine


@contextmanager
def connected(addresses: list[str]) -> Iterator[list[RemoteParameterServer]]:
    """Connect to the servers; that one is restarted is no news."""
    options: dict[str, Any] = {"timeout_s": PATIENCE_S, "on_restart": lambda number: None}
    with Place(Path()) as place, place.connected(*addresses, **options) as servers:
        yield servers


class Client:
    """Trains, and counts what was acknowledged; it repeats a call until it is answered."""

    def __init__(
        self, number: int, addresses: list[str], seed: int, stopping: threading.Event
    ) -> None:
        self.number = number
        self.addresses = addresses
        self.random = np.random.default_rng((seed, number))
        self.counts = np.zeros((len(DIMS), NUM_SIGNS), np.int64)
        self.num_updates = self.num_repeated = 0
        self.stopping = stopping

    def run(self) -> None:
        with connected(self.addresses) as servers:
            while not self.stopping.is_set():
                places = [self.random.permutation(NUM_SIGNS)[:BATCH] for _ in DIMS]
                for number, server in enumerate(servers):
                    self.step(number, server, places)
                self.num_updates += 1

    def step(
        self, number: int, server: RemoteParameterServer, places: list[NDArray[np.int64]]
    ) -> None:
        """Step those of the rows at these places that are this server's."""
        batch = self.num_updates
        every = [signs_of(table)[at] for table, at in enumerate(places)]
        mine = [owned(part, number) for part in every]
        signs = [part[own] for part, own in zip(every, mine, strict=True)]
        asked = tuple(TableSigns(table, part) for table, part in enumerate(signs))
        request = LookupRequest(batch, True, asked)
        hints = [part.hints for part in self.call(server.lookup, request).tables]
        gradients = tuple(
            TableGradients(table, part, hints[table], np.ones((len(part), dim), np.float32))
            for table, (part, dim) in enumerate(zip(signs, DIMS, strict=True))
        )
        reply = self.call(server.update, UpdateRequest((self.number, batch), gradients))
        assert reply.num_missing == 0, reply
        self.num_repeated += reply.repeated
        for table, at in enumerate(places):
            self.counts[table, at[mine[table]]] += 1

    def call(self, method: Callable[[S], T], request: S) -> T:
        while True:
            try:
                return method(request)
            except ServiceError:
                if self.stopping.is_set():
                    raise


def wrong_rows(
    servers: list[RemoteParameterServer], counts: NDArray[np.int64]
) -> list[tuple[int, float, int]]:
    """Return sign, what the row says and what was acknowledged, where they differ."""
    found = []
    for table, dim in enumerate(DIMS):
        held = np.zeros((NUM_SIGNS, dim), np.float32)
        every = signs_of(table)
        for number, server in enumerate(servers):
            asked = TableSigns(table, every[owned(every, number)])
            (entries,) = server.read_embedding((asked,))
            held[(entries.signs & np.uint64(2**32 - 1)).astype(np.int64)] = -entries.values
        wrong = np.flatnonzero((held != counts[table][:, None]).any(axis=1))
        found += [(int(every[x]), float(held[x, 0]), int(counts[table, x])) for x in wrong]
    return found


def replace(cluster: Cluster, number: int) -> tuple[float, float, bool]:
    """Start a server again; returns seconds to rows and to service, and if one was cut."""
    cluster.kill(f"{SERVER}-{number}")
    killed_at = time.monotonic()
    server = cluster.start_replica(SERVER, number)
    server.wait_for("serves at")
    away_s = time.monotonic() - killed_at
    printed = server.printed()
    said = re.search(r"of a process that ended, after ([\d.]+) s; (\d+) updates", printed)
    assert said is not None, printed
    return float(said[1]), away_s, said[2] != "0"


def soak(num_kills: int, seed: int, show: bool = False) -> str:
    """Kill servers ``num_kills`` times; returns what happened, if every row is right."""
    chance = random.Random(seed)
    with (
        tempfile.TemporaryDirectory(prefix="persia-soak-", dir="/dev/shm") as rows,
        Cluster(CONFIG, LIMIT, num_servers=NUM_SERVERS) as cluster,
        ExitStack() as stack,
    ):
        cluster.variables["PERSIA_STATE_DIRECTORY"] = rows
        for number in range(NUM_SERVERS):
            cluster.start_replica(SERVER, number)
        addresses = cluster.addresses[SERVER]
        servers = stack.enter_context(connected(addresses))
        for server in servers:
            server.configure(SETTINGS)
            server.register_optimizer(SGD)
        pool, stopping = stack.enter_context(ThreadPoolExecutor(NUM_CLIENTS)), threading.Event()
        stack.callback(stopping.set)
        clients = [Client(number, addresses, seed, stopping) for number in range(NUM_CLIENTS)]
        running = [pool.submit(client.run) for client in clients]
        begin = time.monotonic()
        kills: list[tuple[float, float, bool]] = []
        while len(kills) < num_kills:
            # After a drawn number of updates, so that a kill comes at any moment of the next.
            done = sum(client.num_updates for client in clients) + chance.randrange(
                MOST_BETWEEN
            )

            def goes_on(done: int = done) -> bool:
                assert not any(each.done() for each in running)
                return sum(client.num_updates for client in clients) > done

            until(goes_on)
            kills.append(replace(cluster, chance.randrange(NUM_SERVERS)))
            if show and len(kills) % 10 == 0:
                print(len(kills), sum(c.num_updates for c in clients), flush=True)
        recovered, away, cut_short = zip(*kills, strict=True)
        stopping.set()
        for each in running:
            each.result(PATIENCE_S)
        wrong = wrong_rows(servers, np.sum([client.counts for client in clients], axis=0))
        assert not wrong, (len(wrong), wrong[:5])
        return (
            f"{num_kills} kills of {NUM_SERVERS} servers in {time.monotonic() - begin:.0f} s: "
            f"{sum(client.num_updates for client in clients)} updates acknowledged, "
            f"{sum(client.num_repeated for client in clients)} of them repeated after their "
            f"outcome was known, {sum(cut_short)} kills in the middle of one; rows were there "
            f"again after {median(recovered):.2f} s (longest {max(recovered):.2f}), the server "
            f"after {median(away):.1f} s (longest {max(away):.1f}); "
            f"every row is as often stepped as it was acknowledged"
        )


if __name__ == "__main__":
    print(soak(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 1, show=True))
