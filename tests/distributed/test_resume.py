"""A job of two ranks, two data-loaders and several servers, stopped and continued elsewhere."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from persia.data import DataLoader
from tests.distributed.batches import make_batch
from tests.distributed.conftest import run_job
from tests.distributed.net import make_ctx

STEPS = 20

# Each starts ten processes, four of which load torch.
pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("stop", "servers"), [(7, 3), (12, 1), (STEPS, 2)])
def test_a_job_is_stopped_and_continued(tmp_path: Path, stop: int, servers: int) -> None:
    options = {"url": str(tmp_path / "ckpt"), "noise": 1.0}
    (whole,), _ = run_job(2, str(STEPS), **options, dump_at=stop)
    assert [len(rank["losses"]) for rank in whole] == [STEPS, STEPS]
    (rest,), said = run_job(servers, str(STEPS), **options, load=True)
    for before, after in zip(whole, rest, strict=True):
        assert after["losses"] == before["losses"][stop:]
        assert after["rows"] == before["rows"]
        assert after["parameters"] == before["parameters"]
    for text in said:
        assert f"'dropped': {stop}" in text


def test_all_ranks_begin_where_rank_0_says(tmp_path: Path) -> None:
    """Rank 1 sees a checkpoint, as it may when rank 0 has just written one of the beginning."""
    folders = [str(tmp_path / "empty"), str(tmp_path / "seen")]
    with make_ctx() as ctx:
        ctx.dump_checkpoint(folders[1])
    (ranks,), _ = run_job(1, "4", resume_from=folders)
    assert [len(rank["losses"]) for rank in ranks] == [4, 4]


def test_all_ranks_load_the_checkpoint_that_rank_0_finds(tmp_path: Path) -> None:
    """Rank 1 sees a newer one, as it may where rank 0's file system keeps an old list."""
    old, new = tmp_path / "old", tmp_path / "new"
    with make_ctx() as ctx:
        ctx.dump_checkpoint(new)
        shutil.copytree(new, old)
        for batch in DataLoader([make_batch(number) for number in range(2)]):
            output, labels = ctx.forward(batch)
            ctx.backward((output - (labels or [])[0]).square().mean())
        ctx.dump_checkpoint(new, keep_last=2)
    (ranks,), _ = run_job(1, "4", resume_from=[str(old), str(new)])
    assert [len(rank["losses"]) for rank in ranks] == [4, 4]
    assert ranks[0]["parameters"] == ranks[1]["parameters"]


@pytest.mark.parametrize(("name", "is_equal"), [("bytegrad", True), ("decentralized", False)])
def test_baguas_algorithms_train_with_services(name: str, is_equal: bool) -> None:
    (ranks,), _ = run_job(1, str(STEPS), algorithm=name)
    assert [len(rank["losses"]) for rank in ranks] == [STEPS, STEPS]
    assert (ranks[0]["parameters"] == ranks[1]["parameters"]) is is_equal
