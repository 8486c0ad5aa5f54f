"""Training over servers that are killed again and again: each batch counts once in each row."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.batches import SLOTS
from tests.faults.job import make_ctx
from tests.faults.test_faults import COUNT, LOADER, assert_each_once, train
from tests.support.processes import Cluster

SETTINGS = {"embedding_parameter_server_config": {"memory_limit": "16MiB"}}


@pytest.mark.slow
def test_w17_w30_killed_servers_have_their_rows_again(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep = {"PERSIA_STATE_DIRECTORY": str(directory)}
    with Cluster(SLOTS, SETTINGS, num_servers=2, num_workers=2, environment=keep) as cluster:
        cluster.start_servers()
        for name, value in cluster.variables.items():
            monkeypatch.setenv(name, value)

        def disturb() -> None:
            for number in range(2):
                cluster.kill(f"embedding-parameter-server-{number}")
                cluster.start_server(number)

        cluster.start_loaders(LOADER, 1, str(COUNT))
        with make_ctx() as ctx:
            assert_each_once(ctx, train(ctx, 20, disturb))
        log = cluster.log("embedding-worker-0") + cluster.log("embedding-worker-1")
    assert "rows again; training goes on" in log
    assert "ARE LOST" not in log
