"""A training server, or a follower of its log, as a process that can be killed.

    python -m tests.rows.log_process write FOLDER STATE
    python -m tests.rows.log_process follow FOLDER

Each step adds STEP to every value of every row. The first prints the steps of each packet that
is there, the second those of its rows whenever they have changed.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from persia._rows.live_rows import LiveRows
from persia._rows.row_source import RowSource
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

SCHEMA = EmbeddingSchema.load({"slots_config": {"user": {"dim": 4}}})
SIGNS = np.arange(3000, dtype=np.uint64) + np.uint64(SCHEMA.slots["user"].prefix)
SHARDS = 2
# Exact in f32, as is every sum of it.
STEP = 1 / 64
SETTINGS = HyperParameters(InitializationSettings("constant", {"value": 0.0}), 1.0, 1e6, 7)


def write(folder: str, state: Path) -> None:
    config = ParameterServerConfig(
        capacity=100_000,
        num_hashmap_internal_shards=SHARDS,
        enable_incremental_update=True,
        incremental_dir=folder,
        incremental_buffer_size=1 << 40,
    )
    server = ParameterServer(SCHEMA, config, state_file=StateFile(state, SHARDS))
    server.configure(SETTINGS)
    server.register_optimizer(OptimizerSettings("sgd", {"lr": STEP}))
    tables = (TableSigns(0, SIGNS),)
    server.lookup(LookupRequest(0, True, tables))
    (entries,) = server.read_embedding(tables)
    # An update that was cut short is sent again, as its embedding-worker would.
    begun = round(float(entries.values.min()) / STEP)
    gradients = np.full((len(SIGNS), 4), -1.0, np.float32)
    log = server._incremental
    assert log is not None
    for number in range(begun, 1 << 20):
        server.update(UpdateRequest((5, number), (TableGradients(0, SIGNS, None, gradients),)))
        log.flush()
        print(number + 1, flush=True)


def steps_of(rows: LiveRows) -> tuple[int, int]:
    """The fewest and the most steps that a row has; -1 if one is missing."""
    out = np.empty((len(SIGNS), 4), np.float32)
    with rows.view() as view:
        if view.lookup(0, SIGNS, out):
            return -1, -1
    return round(float(out.min()) / STEP), round(float(out.max()) / STEP)


def follow(folder: str) -> None:
    rows = LiveRows(RowSource(change_log=folder), SCHEMA, follow_interval_s=0.01)
    rows.load()
    shown = (-2, -2)
    while True:
        if (found := steps_of(rows)) != shown:
            shown = found
            print(*found, flush=True)
        rows.poll()


if __name__ == "__main__":
    if sys.argv[1] == "write":
        write(sys.argv[2], Path(sys.argv[3]))
    else:
        follow(sys.argv[2])
