"""Two ranks over real services, as `persia-launcher nn-worker` starts them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.faults.batches import SLOTS
from tests.support.processes import Cluster

SCRIPTS = Path(__file__).parent / "scripts"
IN_ORDER = {"reproducible": True, "embedding_staleness": 1}

# Each starts seven processes, four of which load torch.
pytestmark = pytest.mark.slow


def train(ranks: int, count: int, parts: int, **options: Any) -> list[dict[str, Any]]:
    """Train with ``count`` batches of ``parts`` parts; return what each rank saw."""
    with Cluster(SLOTS, num_ranks=ranks) as cluster:
        cluster.start_servers()
        cluster.start_loaders(SCRIPTS / "loader.py", 1, str(count), str(parts))
        script = (str(SCRIPTS / "train.py"), str(cluster.place), json.dumps(options))
        cluster.start("nn-worker", "nn-worker", "--nproc-per-node", str(ranks), *script)
        statuses = cluster.wait()
        assert set(statuses.values()) == {0}, statuses
        return [
            json.loads((cluster.place / f"rank-{rank}.json").read_text())
            for rank in range(ranks)
        ]


def test_two_ranks_are_one_with_the_same_global_batch() -> None:
    steps = 200
    two = train(2, 2 * steps, 1, loader=IN_ORDER)
    one = train(1, steps, 2, loader=IN_ORDER)[0]
    of_both = np.mean([rank["losses"] for rank in two], axis=0)
    assert len(of_both) == steps
    np.testing.assert_allclose(of_both, one["losses"], rtol=0, atol=1e-5)
    assert np.mean(one["losses"][-20:]) < 0.5 * np.mean(one["losses"][:20])  # it learns
    assert two[0]["net"] == two[1]["net"]


def test_two_ranks_in_order_give_the_same_bits_each_time() -> None:
    first, second = (train(2, 61, 1, loader=IN_ORDER) for _ in range(2))
    assert first == second
    # The round in which rank 1 had no batch was dropped, and counted.
    assert [rank["seen"] for rank in first] == [list(range(0, 60, 2)), list(range(1, 60, 2))]
    assert sum(rank["stats"]["incomplete"] for rank in first) == 1


def test_without_drop_last_every_batch_is_trained() -> None:
    ranks = train(2, 61, 1, loader={"drop_last": False, "embedding_staleness": 4})
    assert sorted(number for rank in ranks for number in rank["seen"]) == list(range(61))
    assert ranks[0]["net"] == ranks[1]["net"]


@pytest.mark.parametrize("algorithm", ["bytegrad", "decentralized"])
def test_baguas_algorithms_train_with_services(algorithm: str) -> None:
    for rank in train(2, 200, 1, loader={"embedding_staleness": 4}, algorithm=algorithm):
        assert len(rank["seen"]) == 100
        assert np.mean(rank["losses"][-20:]) < 0.5 * np.mean(rank["losses"][:20])
