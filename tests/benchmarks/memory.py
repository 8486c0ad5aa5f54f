"""Memory of a parameter server, by resident set, each figure in a process of its own.

    python -m tests.benchmarks.memory OPTIMIZER ROWS     growth to twice ROWS
    python -m tests.benchmarks.memory empty 0            capacity 1e9, no row

Prints one line of JSON: bytes per row at ROWS, and the worst between half and twice ROWS.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from persia._core.kernels.initial import Initializer
from persia._core.kernels.optim import RowOptimizer
from persia._core.store.store import EmbeddingStore

DIM = 16
CHUNK = 100_000
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adagrad": {"name": "adagrad"},
    "sgd": {"name": "sgd", "lr": 0.1},
    "shared": {"name": "adagrad", "vectorwise_shared": True},
}


def resident(pid: int | str = "self") -> int:
    """Return the resident set of a process in bytes, this one's if none is named."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def measure(what: str, num_rows: int) -> dict[str, float]:
    """Grow a store to twice ``num_rows`` in this process and watch its resident set."""
    start = resident()
    store = EmbeddingStore(1_000_000_000)
    if what == "empty":
        store.configure(RowOptimizer(**OPTIMIZERS["adagrad"]))
        return {"process_bytes": resident(), "store_bytes": resident() - start}
    store.configure(RowOptimizer(**OPTIMIZERS[what]))
    initializer = Initializer("uniform", lower=-0.01, upper=0.01)
    # Written, so that they are resident before the store is measured.
    rows, hints = np.ones((CHUNK, DIM), np.float32), np.ones(CHUNK, np.uint32)
    start = resident() - store.stats()["bytes"]
    per_row = {}
    for first in range(0, 2 * num_rows, CHUNK):
        signs = np.arange(first, first + CHUNK, dtype=np.uint64) | np.uint64(1 << 56)
        store.lookup_train(signs, initializer, 1.0, first, rows, hints)
        held = first + CHUNK
        per_row[held] = (resident() - start) / held
    return {
        "bytes_per_row": per_row[num_rows],
        "worst_bytes_per_row": max(at for held, at in per_row.items() if held >= num_rows // 2),
    }


def in_fresh_process(what: str, num_rows: int) -> dict[str, float]:
    """Return ``measure`` as a process sees it that has done nothing else."""
    words = ["-m", "tests.benchmarks.memory", what, str(num_rows)]
    measured: dict[str, float] = json.loads(subprocess.check_output([sys.executable, *words]))
    return measured


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1], int(sys.argv[2]))))
