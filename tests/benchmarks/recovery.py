"""What it costs that a killed server has its rows again, and how long it takes.

    python -m tests.benchmarks.recovery [ROWS [PAIRS]]

Two parameter servers hold the same rows, one of them in a state file. A step is a training
lookup and an Adagrad update as in policies.py, with everything that a server does for it, timed
by the thread's CPU clock; a ratio above 1 is faster than without a file. Then the file is taken
up again, as by a new process.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from persia._rpc.messages import (
    HyperParameters,
    InitializationSettings,
    LookupRequest,
    OptimizerSettings,
    TableGradients,
    TableSigns,
    UpdateRequest,
)
from persia._server.service import ParameterServer
from persia._server.state_file import StateFile
from persia.config import EmbeddingSchema, ParameterServerConfig
from tests.benchmarks.interleaved import interleave, ratio
from tests.benchmarks.policies import DIM, IDS, WORKLOADS, Signs

SHARDS = 16
SCHEMA = EmbeddingSchema.load({"slots_config": {"id": {"dim": DIM}}})
SETTINGS = HyperParameters(InitializationSettings("uniform", {}), 1.0, 10.0, 1)
GROUP = np.uint64(1 << 56)


def new_server(rows: int, state: StateFile | None) -> ParameterServer:
    config = ParameterServerConfig(
        capacity=rows, num_hashmap_internal_shards=SHARDS, memory_limit=0
    )
    return ParameterServer(SCHEMA, config, state_file=state)


class Server:
    def __init__(self, rows: int, state: StateFile | None) -> None:
        self.rows = rows
        self.server = new_server(rows, state)
        self.server.configure(SETTINGS)
        self.server.register_optimizer(OptimizerSettings("adagrad", {"lr": 0.1}))
        self.number = 0
        self.gradients = np.random.default_rng(0).normal(0, 1, (IDS, DIM)).astype(np.float32)

    def step(self, signs: Signs) -> float:
        """Train; returns millions of ids a second of this thread's time."""
        begin = time.thread_time()
        self.number += 1
        asked = (TableSigns(0, signs),)
        (part,) = self.server.lookup(LookupRequest(self.number, True, asked)).tables
        gradients = (TableGradients(0, signs, part.hints, self.gradients[: len(signs)]),)
        self.server.update(UpdateRequest((1, self.number), gradients))
        return len(signs) / (time.thread_time() - begin) / 1e6

    def fill(self) -> float:
        ids = np.arange(self.rows, dtype=np.uint64) | GROUP
        rates = [self.step(ids[first : first + IDS]) for first in range(0, self.rows, IDS)]
        return float(np.median(rates))

    def train(self, name: str, pairs: int) -> Iterator[float]:
        random = np.random.default_rng(1)  # the same ids for both
        for number in range(pairs + 2):
            signs = np.unique(WORKLOADS[name](random, self.rows, number))
            yield self.step(random.permutation(signs)[:IDS] | GROUP)


def main(rows: int = 10_000_000, pairs: int = 41) -> None:
    """Print the ratios, and the time of a recovery."""
    with tempfile.TemporaryDirectory(prefix="persia-bench-", dir="/dev/shm") as directory:
        path = Path(directory) / "persia-bench.rows"
        state = StateFile(path, SHARDS)
        plain, kept = Server(rows, None), Server(rows, state)
        fills = plain.fill(), kept.fill()
        print(f"fill   {fills[0]:6.2f} -> {fills[1]:6.2f} M ids/s, {fills[1] / fills[0]:.3f}")
        for name in WORKLOADS:
            turns = {
                "plain": plain.train(name, pairs).__next__,
                "kept": kept.train(name, pairs).__next__,
            }
            other, own = interleave(turns, pairs, warm=2).values()
            print(f"{name:6} {other.rate:6.2f} -> {own.rate:6.2f} M ids/s, {ratio(own, other)}")
        held = kept.server.get_embedding_size()
        state.close()
        del kept, plain, turns
        begin, cpu = time.perf_counter(), time.process_time()
        again = new_server(rows, StateFile(path, SHARDS))
        took, cpu = time.perf_counter() - begin, time.process_time() - cpu
        assert again.get_embedding_size() == held, again.get_embedding_size()
        print(
            f"taken up again: {held} rows in {took:.2f} s, {took / held * 1e7:.2f} s / 10 M; "
            f"{cpu:.2f} s of CPU time"
        )


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
