"""What it costs that a killed server has its rows again, and how long it takes.

    python -m tests.benchmarks.recovery [ROWS [PAIRS]]

Two parameter servers hold the same rows, one of them in a state file. A step is a training
lookup and an Adagrad update of 34,000 distinct ids, dim 16, one thread, with everything that a
server does for it. `zipf`: ids by popularity; `cold`: uniform over all rows; `new`: a tenth of
the ids is new, so that as many rows go. Pairs are interleaved, timed by the thread's CPU clock;
the medians of their ratios, above 1 is faster than without a file. Then the file is taken up
again, as by a new process.
"""

from __future__ import annotations

import sys
import tempfile
import time
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
from tests.benchmarks.interleaved import Series, ratio
from tests.benchmarks.policies import DIM, IDS, Signs, cold, new, zipf

SHARDS = 16
SCHEMA = EmbeddingSchema.load({"slots_config": {"id": {"dim": DIM}}})
SETTINGS = HyperParameters(InitializationSettings("uniform", {}), 1.0, 10.0, 1)
ADAGRAD = OptimizerSettings("adagrad", {"lr": 0.1})
GROUP = np.uint64(1 << 56)


class Server:
    """A server and its steps."""

    def __init__(self, rows: int, state: StateFile | None) -> None:
        config = ParameterServerConfig(
            capacity=rows, num_hashmap_internal_shards=SHARDS, memory_limit=0
        )
        self.server = ParameterServer(SCHEMA, config, state_file=state)
        self.server.configure(SETTINGS)
        self.server.register_optimizer(ADAGRAD)
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

    def fill(self, rows: int) -> float:
        rates = [
            self.step(np.arange(at, min(at + IDS, rows), dtype=np.uint64) | GROUP)
            for at in range(0, rows, IDS)
        ]
        return float(np.median(rates))


def main(rows: int = 10_000_000, pairs: int = 41) -> None:
    """Print the ratios, and the time of a recovery."""
    with tempfile.TemporaryDirectory(prefix="persia-bench-", dir="/dev/shm") as directory:
        path = Path(directory) / "persia-bench.rows"
        state = StateFile(path, SHARDS)
        plain, kept = Server(rows, None), Server(rows, state)
        fills = plain.fill(rows), kept.fill(rows)
        print(f"fill   {fills[0]:6.2f} -> {fills[1]:6.2f} M ids/s, {fills[1] / fills[0]:.3f}")
        random = np.random.default_rng(1)
        for name, draw in {"zipf": zipf, "cold": cold, "new": new}.items():
            series: list[list[float]] = [[], []]
            for number in range(pairs + 2):
                signs = np.unique(draw(random, rows, number))
                signs = random.permutation(signs)[:IDS] | GROUP
                order = (plain, kept) if number % 2 else (kept, plain)
                rates = {id(server): server.step(signs) for server in order}
                if number >= 2:
                    series[0].append(rates[id(plain)])
                    series[1].append(rates[id(kept)])
            own, other = Series(series[1], [0.0]), Series(series[0], [0.0])
            print(f"{name:6} {other.rate:6.2f} -> {own.rate:6.2f} M ids/s, {ratio(own, other)}")
        held = kept.server.get_embedding_size()
        state.close()
        del kept, plain
        begin, cpu = time.perf_counter(), time.process_time()
        again = ParameterServer(
            SCHEMA,
            ParameterServerConfig(
                capacity=rows, num_hashmap_internal_shards=SHARDS, memory_limit=0
            ),
            state_file=StateFile(path, SHARDS),
        )
        took, cpu = time.perf_counter() - begin, time.process_time() - cpu
        assert again.get_embedding_size() == held, again.get_embedding_size()
        print(
            f"taken up again: {held} rows in {took:.2f} s, {took / held * 1e7:.2f} s / 10 M; "
            f"{cpu:.2f} s of CPU time"
        )


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
