"""Two ranks by torchrun that read one file of one row group, as pandas writes it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.conftest import SCRIPTS
from tests.faults.batches import SLOTS
from tests.support.processes import Cluster

pytestmark = pytest.mark.slow  # a job whose two ranks load torch


def test_both_ranks_train_and_one_without_a_row_ends_the_job(tmp_path: Path) -> None:
    pd = pytest.importorskip("pandas")
    files = []
    for count in (100, 1):
        rows = {"user": range(count), "item": range(count), "click": [0.5] * count}
        files.append(str(tmp_path / f"{count}.parquet"))
        pd.DataFrame(rows).to_parquet(files[-1])
    with Cluster(SLOTS, num_ranks=2) as cluster:
        cluster.start_servers()
        words = ("--nproc-per-node", "2", str(SCRIPTS / "one_file.py"), *files)
        cluster.start_trainer(*words)
        statuses = cluster.wait()
        said = cluster.log("nn-worker")
    assert [said.count(f"rank {rank} made 7 steps") for rank in range(2)] == [1, 1], said
    assert "made 0 steps" not in said
    assert statuses["nn-worker"] != 0, said
    assert "ParquetReader: shard 0 of 2 has no rows; there are 1 in all" in said
