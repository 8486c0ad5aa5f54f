"""The least of every budget, in order, with a loader that stalls and a batch that is large.

One credit for each of two data-loaders, one batch in flight, room for a handful of batches at
the embedding-worker: there is no deadlock, and every batch is trained once.
"""

from __future__ import annotations

import json
import os
from typing import Any

import numpy as np
import pytest

from persia.data import DataLoader, StreamingDataset
from tests.faults.batches import SLOTS, occurrences
from tests.faults.job import LOADER
from tests.support.processes import Cluster

COUNT, LARGE = 24, 9
# Its ids are 8 MiB, which the broker of the original would have refused.
LARGE_SIZE = 1 << 19
# Two credits, one batch in flight, and one on its way from the one to the other.
SETTINGS = {"embedding_worker_config": {"forward_buffer_size": 4}}


def least_loader() -> DataLoader:
    return DataLoader(
        StreamingDataset(buffer_size=1),
        forward_buffer_size=1,
        num_workers=1,
        reproducible=True,
        embedding_staleness=1,
        timeout_ms=60_000,
    )


@pytest.mark.slow
@pytest.mark.parametrize(("num_ranks", "settings"), [(1, SETTINGS), (2, {})])
def test_w65_least_budgets_a_stalled_loader_and_a_large_batch(
    num_ranks: int, settings: dict[str, Any]
) -> None:
    with Cluster(SLOTS, settings, num_ranks=num_ranks) as cluster:
        gate, output = cluster.place / "gate", cluster.place / "found.json"
        os.mkfifo(gate)
        cluster.start_servers()
        words = (str(COUNT), str(LARGE), str(LARGE_SIZE), str(gate))
        cluster.start_loaders(LOADER, 2, *words)
        script = (str(LOADER.with_name("train.py")), str(output))
        cluster.start_trainer("--nproc-per-node", str(num_ranks), *script)
        statuses = cluster.wait()
        assert set(statuses.values()) == {0}, statuses
        found = json.loads(output.read_text())
    assert found["seen"] == list(range(0, COUNT, num_ranks))
    for name, counts in occurrences(COUNT, {LARGE: LARGE_SIZE}).items():
        np.testing.assert_array_equal(found["counts"][name], counts)
    assert found["stats"]["batches"] == COUNT // num_ranks
