"""What rows and gradients of two bytes cost in AUC, and how gradients are best rounded.

    python -m tests.benchmarks.wire_dtypes [--seeds 5] [--logs adult ...] [--variants ...]

Every message of a job passes the codec twice, as between processes: rows from the servers and
pooled to the trainer, gradients back. Beside the codec's own rounding, to nearest, two others
round gradients to bfloat16 before it:

    chance     up or down by chance, drawn by update and row, so that the mean is exact
    feedback   to nearest, and what is lost of a row's sum is added to its next one, as far as
               there are rows: from the embedding-worker to the servers

Each log is trained once per seed in lockstep. "next bits" is float32 with gradients larger by
2^-22: what differences of that size mean. Prints the mean of differences to float32, in 1e-4.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from persia._core.base.halves import narrow, round_rows, widen
from persia._rpc.codec import FLOAT32
from persia._rpc.messages import ParameterServer as ParameterServerMethods
from persia._rpc.messages import TableGradients, UpdateRequest, WireDtypes
from persia._rpc.methods import Role, embedding_worker, parameter_server
from persia._server.service import ParameterServer
from persia._worker.service import EmbeddingWorker
from persia.config import EmbeddingSchema, EmbeddingWorkerConfig, ParameterServerConfig
from tests.benchmarks.staleness import DIM, LOGS, Log, auc_of, context, log_of, train

BFLOAT16 = WireDtypes("bfloat16", "bfloat16")
ONLY_GRADIENTS = WireDtypes("float32", "bfloat16")

Arguments = tuple[Any, ...]


class OverTheWire:
    """A service whose messages pass the codec there and back, without a socket.

    ``rounds`` may replace the arguments of an update before that.
    """

    def __init__(
        self,
        service: Any,
        role: Role,
        wire: WireDtypes,
        rounds: Callable[[Any], Any] = lambda request: request,
    ) -> None:
        self.service, self._role, self._wire, self._rounds = service, role, wire, rounds

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self.service, name)
        method = self._role.methods.get(name)
        return attribute if method is None else partial(self._call, method, attribute)

    def _call(self, method: Any, function: Any, *arguments: Any) -> Any:
        if method.name == "update":
            arguments = (self._rounds(*arguments),)
        there = method.write_arguments(arguments, self._wire)
        result = function(*method.read_arguments(*there))
        return method.read_result(*method.write_result(result, self._wire))


def rounded(array: Any, by: Any, number: int) -> Any:
    """Return gradients that bfloat16 has, chosen by chance; ``by`` is a number of each row."""
    short = round_rows(np.ascontiguousarray(array), by, "bfloat16", 0, number)
    return widen(short.reshape(-1), "bfloat16").reshape(array.shape)


def sums_by_chance(request: UpdateRequest) -> UpdateRequest:
    """Round the sums of an update."""
    number = request.update_id[1]
    tables = [
        replace(table, gradients=rounded(table.gradients, table.signs, number))
        for table in request.tables
    ]
    return replace(request, tables=tuple(tables))


def samples_by_chance(batch: Any) -> Any:
    """Round the gradients of a batch's outputs."""
    slots = []
    for place, slot in enumerate(batch.gradients):
        rows = np.arange(len(slot.gradient), dtype=np.uint64) + np.uint64(place << 40)
        gradient = rounded(slot.gradient, rows, batch.update_id[1])
        slots.append(replace(slot, gradient=gradient))
    return replace(batch, gradients=tuple(slots))


def next_bits(request: UpdateRequest) -> UpdateRequest:
    """Make the sums of an update larger by 2^-22."""
    more = np.float32(1 + 2**-22)
    tables = [replace(table, gradients=table.gradients * more) for table in request.tables]
    return replace(request, tables=tuple(tables))


class Feedback:
    """Adds to a row's sum what rounding has cost the one before."""

    def __init__(self) -> None:
        self._places: dict[int, int] = {}
        self._lost = np.zeros((1 << 20, DIM), np.float32)

    def __call__(self, request: UpdateRequest) -> UpdateRequest:
        return replace(request, tables=tuple(map(self._table, request.tables)))

    def _table(self, table: TableGradients) -> TableGradients:
        known = self._places
        places = [known.setdefault(sign, len(known)) for sign in table.signs.tolist()]
        wanted = table.gradients + self._lost[places]
        short = widen(narrow(wanted.reshape(-1), "bfloat16"), "bfloat16").reshape(wanted.shape)
        self._lost[places] = wanted - short
        return replace(table, gradients=short)


# By name: how messages travel, and what rounds gradients before; of samples, and of sums.
VARIANTS: dict[str, tuple[WireDtypes, Any, Any]] = {
    "float32": (FLOAT32, None, None),
    "next bits": (FLOAT32, None, lambda: next_bits),
    "bfloat16": (BFLOAT16, None, None),
    "bfloat16 by chance": (BFLOAT16, lambda: samples_by_chance, lambda: sums_by_chance),
    "bfloat16 with feedback": (BFLOAT16, None, Feedback),
    "bfloat16, gradients only": (ONLY_GRADIENTS, None, None),
    "float16": (WireDtypes("float16", "float16"), None, None),
}


def worker_of(schema: Any, wire: WireDtypes, samples: Any, sums: Any) -> Any:
    """Return an embedding-worker and its server, as the variant has them."""
    found = EmbeddingSchema.load(schema)
    server: Any = ParameterServer(found, ParameterServerConfig(), replica_index=0)
    plain: Callable[[Any], Any] = lambda request: request  # noqa: E731
    server = OverTheWire(server, parameter_server(), wire, sums() if sums else plain)
    servers: list[ParameterServerMethods] = [server]
    worker = EmbeddingWorker(found, EmbeddingWorkerConfig(), servers)
    return OverTheWire(worker, embedding_worker(), wire, samples() if samples else plain)


def auc(log: Log, seed: int, variant: str) -> float:
    """Train a log once, in lockstep; return the AUC behind it."""
    slots = {f"f{i}": {"dim": DIM} for i in range(log.ids.shape[1])}
    worker = worker_of({"slots_config": slots}, *VARIANTS[variant])
    with contextlib.closing(worker.service), context(log, seed, 64, worker) as ctx:
        train(ctx, log, 1)
        return auc_of(ctx, log)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--logs", nargs="+", choices=LOGS, default=LOGS)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    options = parser.parse_args()
    torch.set_num_threads(1)
    chosen = dict.fromkeys(["float32", *options.variants])
    for name in options.logs:
        found: dict[str, list[float]] = {variant: [] for variant in chosen}
        for seed in range(options.seeds):
            log = log_of(name, seed)
            for variant, values in found.items():
                values.append(auc(log, seed, variant))
        for variant, values in found.items():
            differences = np.subtract(values, found["float32"]) * 1e4
            each = " ".join(f"{value:+.1f}" for value in differences)
            mean = statistics.fmean(differences)
            print(f"{name}, {variant}: {statistics.fmean(values):.5f} {mean:+.2f} ({each})")


if __name__ == "__main__":
    main()
