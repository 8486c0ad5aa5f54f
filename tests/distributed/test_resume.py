"""A job of two ranks, two data-loaders and several servers, stopped and continued elsewhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.batches import SLOTS
from tests.support.processes import Cluster

SCRIPTS = Path(__file__).parent / "scripts"
STEPS = 20

# Each starts ten processes, four of which load torch.
pytestmark = pytest.mark.slow


def run(num_servers: int, **options: Any) -> tuple[list[dict[str, Any]], list[str]]:
    """Run a job; return what each rank saw, and what each data-loader said."""
    with Cluster(SLOTS, num_servers=num_servers, num_workers=2, num_ranks=2) as cluster:
        cluster.start_servers()
        cluster.start_loaders(SCRIPTS / "phases_loader.py", 2, str(STEPS))
        script = (str(SCRIPTS / "resume.py"), str(cluster.place), json.dumps(options))
        cluster.start("nn-worker", "nn-worker", "--nproc-per-node", "2", *script)
        statuses = cluster.wait()
        assert set(statuses.values()) == {0}, cluster.logs()
        found = [
            json.loads((cluster.place / f"rank-{rank}.json").read_text()) for rank in range(2)
        ]
        return found, [cluster.log(f"data-loader-{number}") for number in range(2)]


@pytest.mark.parametrize(("stop", "servers"), [(7, 3), (12, 1), (STEPS, 2)])
def test_a_job_is_stopped_and_continued(tmp_path: Path, stop: int, servers: int) -> None:
    url = str(tmp_path / "ckpt")
    whole, _ = run(2, url=url, dump_at=stop, load=False)
    assert [len(rank["losses"]) for rank in whole] == [STEPS, STEPS]
    rest, said = run(servers, url=url, dump_at=0, load=True)
    for before, after in zip(whole, rest, strict=True):
        assert after["losses"] == before["losses"][stop:]
        assert after["rows"] == before["rows"]
        assert after["dense"] == before["dense"]
    for text in said:
        assert f"'dropped': {stop}" in text


@pytest.mark.parametrize(("name", "is_equal"), [("bytegrad", True), ("decentralized", False)])
def test_baguas_algorithms_train_with_services(name: str, is_equal: bool) -> None:
    ranks, _ = run(1, dump_at=0, load=False, algorithm=name)
    assert [len(rank["losses"]) for rank in ranks] == [STEPS, STEPS]
    assert (ranks[0]["dense"] == ranks[1]["dense"]) is is_equal
