"""DataCtx over sockets: found by the environment, to real embedding-workers."""

from __future__ import annotations

import gc
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from persia import env
from persia._loader import sender
from persia._rpc.methods import embedding_worker, nn_worker
from persia._rpc.server import Server, ServerLimits, serve
from persia._rpc.zmq_transport import ZmqTransport
from persia.ctx import DataCtx, cnt_ctx
from persia.embedding.data import IDTypeFeature, Label, NonIDTypeFeature, PersiaBatch
from persia.errors import (
    ConfigError,
    DataError,
    DataTypeError,
    ServiceError,
    ServiceUnavailable,
)
from tests.support.services import make_servers, make_worker
from tests.support.streams import Background, FakeRank


class Job:
    """The servers of a job, each at an ipc socket, and an environment that names them."""

    def __init__(self, directory: Path, num_workers: int, num_ranks: int) -> None:
        self._directory = directory
        self._transport = ZmqTransport()
        self.stores = make_servers()
        self.workers: list[Any] = [make_worker(self.stores) for _ in range(num_workers)]
        self.ranks = [FakeRank(rank, num_ranks, credits=4) for rank in range(num_ranks)]
        self.servers: dict[str, Server] = {}
        for index in range(num_workers):
            self.serve_worker(index)
        for rank in range(num_ranks):
            self.serve_rank(rank)

    def _address(self, name: str) -> str:
        return f"ipc://{self._directory}/{name}"

    def serve_worker(self, index: int) -> None:
        self.servers[f"w{index}"] = serve(
            self._transport,
            self._address(f"w{index}"),
            embedding_worker(),
            self.workers[index],
            replica_index=index,
            replica_size=len(self.workers),
        )

    def serve_rank(self, rank: int) -> None:
        self.servers[f"r{rank}"] = serve(
            self._transport,
            self._address(f"r{rank}"),
            nn_worker(),
            self.ranks[rank],
            settings=ServerLimits(num_threads=8),
        )

    def name_them(self) -> None:
        for name, letter, num in (
            ("PERSIA_EMBEDDING_WORKERS", "w", len(self.workers)),
            ("PERSIA_NN_WORKERS", "r", len(self.ranks)),
        ):
            os.environ[name] = ",".join(self._address(f"{letter}{i}") for i in range(num))

    def stop(self, name: str) -> None:
        self.servers.pop(name).stop(0.0)

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()
        for name in list(self.servers):
            self.stop(name)
        for worker in self.workers:
            worker.close()
        self._transport.close()


@pytest.fixture
def directory() -> Iterator[Path]:
    # Of their own: the path of a socket must be short.
    path = Path(tempfile.mkdtemp(prefix="persia-"))
    yield path
    shutil.rmtree(path)


@pytest.fixture(autouse=True)
def _no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("PERSIA_", "REPLICA_")) or name in ("RANK", "WORLD_SIZE"):
            monkeypatch.delenv(name)
    monkeypatch.setattr(env, "_place", None)


@pytest.fixture
def job(directory: Path) -> Iterator[Job]:
    made = Job(directory, num_workers=2, num_ranks=2)
    made.name_them()
    yield made
    made.close()


def batch(number: int, **changes: Any) -> PersiaBatch:
    options: dict[str, Any] = {
        "non_id_type_features": [NonIDTypeFeature(np.full((2, 3), number, np.float32))],
        "labels": [Label(np.full((2, 1), number, np.float32), "clicked")],
        "meta": b"number %d" % number,
    }
    ids = [np.array([number, 7], np.uint64), np.array([], np.uint64)]
    return PersiaBatch([IDTypeFeature("sum", ids)], **(options | changes))


def send_all(num_batches: int, ctx: DataCtx | None = None) -> DataCtx:
    with ctx or DataCtx() as ctx:
        for number in range(num_batches):
            ctx.send_data(batch(number))
    return ctx


def test_batches_arrive_as_they_were_built(job: Job) -> None:
    run = Background(lambda: send_all(10))
    for number in range(10):
        (got,) = job.ranks[number % 2].train(1)
        assert (got.batch_id, got.batch_size, got.requires_grad) == (number, 2, True)
        (dense,), (label,) = got.non_id_type_features, got.labels
        assert dense.name == NonIDTypeFeature.DEFAULT_NAME
        assert label.name == "clicked"
        assert dense.array.dtype == np.float32
        assert np.array_equal(dense.array, np.full((2, 3), number))
        assert np.array_equal(label.array, np.full((2, 1), number))
        assert got.meta is not None
        assert got.meta.tobytes() == b"number %d" % number
        # Their ids wait at the worker that is named, and are this batch's.
        (output,) = job.workers[got.ids.worker].lookup(got.ids.ref, True).outputs
        assert output.values.shape == (2, 4)
        assert output.values[0].any()
        assert not output.values[1].any()
    assert run.result().stats() == {"sent": 10}
    assert [worker.stats()["registered"] for worker in job.workers] == [5, 5]


def test_several_loaders_share_the_ids(job: Job) -> None:
    contexts = []
    for index in range(2):
        env.set_env(replica_size=2, replica_index=index)
        contexts.append(DataCtx().__enter__())
    for number in range(4):
        for ctx in contexts:
            ctx.send_data(batch(number))
    for rank in job.ranks:
        rank.train(4)
    for ctx in contexts:
        ctx.__exit__(None, None, None)
    assert [rank.order for rank in job.ranks] == [[0, 2, 4, 6], [1, 3, 5, 7]]


def test_arrays_may_be_filled_anew(job: Job) -> None:
    dense, label = np.zeros((2, 3), np.float32), np.zeros((2, 1), np.float32)
    with DataCtx() as ctx:
        for number in range(4):
            dense[:], label[:] = number, number
            ctx.send_data(
                batch(
                    number,
                    non_id_type_features=[NonIDTypeFeature(dense)],
                    labels=[Label(label)],
                )
            )
        for number in range(4):
            (got,) = job.ranks[number % 2].train(1)
            assert (got.non_id_type_features[0].array == number).all()
            assert (got.labels[0].array == number).all()


def test_a_batch_that_the_schema_does_not_know_is_refused(job: Job) -> None:
    with DataCtx() as ctx:
        wrong = PersiaBatch(
            [IDTypeFeature("unknown", [np.array([1], np.uint64)])], requires_grad=False
        )
        with pytest.raises(DataError, match="unknown"):
            ctx.send_data(wrong)
        ctx.send_data(batch(0))
        assert job.ranks[0].train(1)[0].batch_id == 0


def test_a_rank_may_be_restarted(job: Job) -> None:
    run = Background(lambda: send_all(12))
    job.ranks[1].train(2)
    job.ranks[0].train(6)
    job.stop("r1")
    job.ranks[1].restart()
    job.serve_rank(1)
    job.ranks[1].wait_for_end()
    trained = [got.batch_id for got in job.ranks[1].train(len(job.ranks[1].waiting))]
    assert trained[-4:] == [5, 7, 9, 11]
    stats = run.result().stats()
    assert stats["sent"] == 12
    assert "lost" not in stats


def test_w69_batches_go_to_the_workers_that_live(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sender, "TRY_S", 0.2)
    with DataCtx() as ctx:
        job.stop("w1")
        for number in range(6):
            ctx.send_data(batch(number))
        job.serve_worker(1)
        for rank in job.ranks:
            assert {got.ids.worker for got in rank.train(3)} == {0}


def test_w69_ids_that_a_worker_lost_are_registered_again(job: Job) -> None:
    run = Background(lambda: send_all(4))
    lost = job.ranks[1].take()
    assert lost.ids.worker == 1
    job.stop("w1")
    job.workers[1].close()
    job.workers[1] = make_worker(job.stores)
    job.serve_worker(1)
    job.ranks[1].want(lost.batch_id)
    job.ranks[1].wait_for(lambda: job.ranks[1].relocations)
    ((batch_id, ids),) = job.ranks[1].relocations
    assert batch_id == lost.batch_id
    job.workers[ids.worker].lookup(ids.ref, True)
    job.ranks[1].acknowledge(lost.batch_id)
    job.ranks[1].train(1)
    job.ranks[0].train(2)
    assert run.result().stats() == {"sent": 4, "registered_again": 1}


# --- how it ends ----------------------------------------------------------------------------


def test_w72_the_end_of_a_good_job_ends_the_block_silently(job: Job) -> None:
    run = Background(lambda: send_all(100))
    job.ranks[0].train(1)
    for name in ("w0", "w1"):
        job.servers[name].job.finish_job(0, True)
    assert run.result().stats()["lost"] > 0


def test_w72_the_loader_takes_the_status_of_a_failed_job(job: Job) -> None:
    run = Background(lambda: send_all(100))
    job.ranks[0].train(1)
    for name in ("w0", "w1"):
        job.servers[name].job.finish_job(3, True)
    with pytest.raises(SystemExit) as caught:
        run.result()
    assert caught.value.code == 3


@pytest.mark.parametrize("status", [0, 4])
def test_a_job_that_ends_before_its_ranks_are_there(job: Job, status: int) -> None:
    job.stop("r1")
    run = Background(lambda: send_all(1))
    for name in ("w0", "w1"):
        job.servers[name].job.finish_job(status, True)
    with pytest.raises(SystemExit) as caught:
        run.result()
    assert caught.value.code == status


def test_the_traceback_of_a_failing_script_reaches_the_ranks(job: Job) -> None:
    ctx = DataCtx()

    def fail() -> None:
        with ctx:
            ctx.send_data(batch(0))
            raise KeyError("column")

    with pytest.raises(KeyError, match="column"):
        fail()
    for rank in job.ranks:
        (failure,) = rank.failures
        assert "KeyError: 'column'" in failure
        assert Path(__file__).name in failure
    assert ctx.stats() == {"sent": 1, "lost": 1}
    assert cnt_ctx() is None


def test_a_script_that_exits_well_has_ended_its_data(job: Job) -> None:
    def leave() -> None:
        with DataCtx() as ctx:
            ctx.send_data(batch(0))
            job.ranks[0].train(1)
            raise SystemExit

    with pytest.raises(SystemExit):
        leave()
    assert [rank.streams[0].end for rank in job.ranks] == [1, 1]
    assert [rank.failures for rank in job.ranks] == [[], []]


def test_an_orphan_ends(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERSIA_FEEDS", "1")
    monkeypatch.setattr(sender, "ORPHAN_S", 0.3)
    monkeypatch.setattr(sender, "CHILD_CALL_S", 1.0)
    monkeypatch.setattr(sender, "TRY_S", 0.2)
    run = Background(lambda: send_all(100))
    job.ranks[0].train(1)
    for name in list(job.servers):
        job.stop(name)
    with pytest.raises(
        ServiceUnavailable, match=r"nn-worker \d is gone|no embedding-worker has"
    ):
        run.result()


def test_a_server_that_stays_away_is_named(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERSIA_RPC_TIMEOUT", "0.4")
    run = Background(lambda: send_all(100))
    job.ranks[0].train(1)
    job.stop("r1")
    with pytest.raises(ServiceError, match="nn-worker 1"):
        run.result()


# --- where it can be used -------------------------------------------------------------------


def test_send_data_checks_what_it_is_given(job: Job) -> None:
    ctx = DataCtx()
    with pytest.raises(ConfigError, match=r"DataCtx\.send_data"):
        ctx.send_data(batch(0))
    with ctx, pytest.raises(DataTypeError, match="expected a PersiaBatch, got dict"):
        ctx.send_data({})  # type: ignore[arg-type]
    assert ctx.stats() == {}


def test_a_context_may_be_entered_again(job: Job) -> None:
    ctx = DataCtx()
    for _ in range(2):
        run = Background(lambda: send_all(2, ctx))
        for rank in job.ranks:
            rank.train(1)
        assert run.result().stats() == {"sent": 2}


def test_an_nn_worker_is_no_data_loader(job: Job) -> None:
    env.set_env(world_size=2, rank=0, local_rank=0)
    with pytest.raises(ConfigError, match="RANK is set"), DataCtx():
        pass


def test_embedded_mode_needs_a_parent() -> None:
    with pytest.raises(ConfigError, match=r"embedded mode.*StreamingDataset"), DataCtx():
        pass


@pytest.mark.slow
def test_nothing_is_left_after_a_hundred_times(directory: Path) -> None:
    job = Job(directory, num_workers=1, num_ranks=1)
    job.name_them()
    try:
        send_one(job)
        gc.collect()
        threads, files = threading.active_count(), num_files()
        for _ in range(100):
            send_one(job)
        gc.collect()
        # The server's own threads come as calls do.
        mine = [x.name for x in threading.enumerate() if not x.name.startswith("persia-serve")]
        assert len(mine) <= threads, mine
        assert num_files() <= files + 2
    finally:
        job.close()


def num_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def send_one(job: Job) -> None:
    with DataCtx() as ctx:
        ctx.send_data(batch(0))
        job.ranks[0].train(1)
