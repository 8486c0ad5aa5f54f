"""DataCtx over sockets: found by the environment, to real embedding-workers."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from persia import env
from persia._loader import sender
from persia._rpc.methods import Role, embedding_worker, nn_worker
from persia._rpc.server import Server, ServerLimits, serve
from persia._rpc.zmq_transport import ZmqTransport
from persia.ctx import DataCtx, cnt_ctx
from persia.embedding.data import IDTypeFeature, Label, NonIDTypeFeature, PersiaBatch
from persia.errors import ConfigError, DataTypeError, ServiceUnavailable
from tests.support.services import make_servers, make_worker
from tests.support.streams import Background, FakeRank


class Job:
    """Two embedding-workers and two ranks at ipc sockets, named in the environment."""

    def __init__(self, directory: Path) -> None:
        self._transport = ZmqTransport()
        self._directory = directory
        stores = make_servers()
        self.workers: list[Any] = [make_worker(stores) for _ in range(2)]
        self.ranks = [FakeRank(rank, 2, credits=4) for rank in range(2)]
        self.servers: dict[str, Server] = {}
        limits = ServerLimits(num_threads=8)
        for number in range(2):
            own: dict[str, Any] = {"replica_index": number, "replica_size": 2}
            self._serve(f"w{number}", embedding_worker(), self.workers[number], **own)
            self._serve(f"r{number}", nn_worker(), self.ranks[number], settings=limits)
        for name, letter in (("EMBEDDING", "w"), ("NN", "r")):
            both = f"ipc://{directory}/{letter}0,ipc://{directory}/{letter}1"
            os.environ[f"PERSIA_{name}_WORKERS"] = both

    def _serve(self, name: str, role: Role, service: object, **options: Any) -> None:
        address = f"ipc://{self._directory}/{name}"
        self.servers[name] = serve(self._transport, address, role, service, **options)

    def finish(self, status: int) -> None:
        for name in ("w0", "w1"):
            self.servers[name].job.finish_job(status, True)

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
def job(no_job: None) -> Iterator[Job]:
    # A directory of its own: the path of a socket must be short.
    with tempfile.TemporaryDirectory(prefix="persia-") as directory:
        made = Job(Path(directory))
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


def test_arrays_may_be_filled_again(job: Job) -> None:
    dense, label = np.zeros((2, 3), np.float32), np.zeros((2, 1), np.float32)
    with DataCtx() as ctx:
        for number in range(4):
            dense[:], label[:] = number, number
            features, labels = [NonIDTypeFeature(dense)], [Label(label)]
            ctx.send_data(batch(number, non_id_type_features=features, labels=labels))
        for number in range(4):
            (got,) = job.ranks[number % 2].train(1)
            assert (got.non_id_type_features[0].array == number).all()
            assert (got.labels[0].array == number).all()


# --- how it ends ----------------------------------------------------------------------------


def test_w72_the_end_of_a_good_job_ends_the_block_silently(job: Job) -> None:
    run = Background(lambda: send_all(100))
    job.ranks[0].train(1)
    job.finish(0)
    assert run.result().stats()["lost"] > 0


@pytest.mark.parametrize(("status", "has_begun"), [(3, True), (0, False), (4, False)])
def test_w72_the_loader_takes_the_jobs_status(job: Job, status: int, has_begun: bool) -> None:
    if not has_begun:
        job.stop("r1")
    run = Background(lambda: send_all(100))
    if has_begun:
        job.ranks[0].train(1)
    job.finish(status)
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
    with pytest.raises(ServiceUnavailable, match=r"nn-worker \d is gone|no embedding-worker"):
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


def test_embedded_mode_needs_a_parent(no_job: None) -> None:
    with pytest.raises(ConfigError, match=r"embedded mode.*StreamingDataset"), DataCtx():
        pass
