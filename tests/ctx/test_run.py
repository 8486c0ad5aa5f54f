"""What a training run opens and closes."""

from __future__ import annotations

import pytest

from persia import env
from persia._files.writer_lock import JobFolders
from persia._report.summary import TrainingRecord
from persia._training.ranks import Ranks
from persia.ctx import (
    TrainCtx,
)
from persia.ctx.connection import Connection
from persia.data import DataLoader
from persia.errors import ConfigError
from tests.training.conftest import MakeCtx, step
from tests.training.fakes import FakeWorker, make_batch


def test_gradients_of_ranks_are_averaged_or_summed(
    make_ctx: MakeCtx, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Alone(Ranks):
        """One rank of four, whose three others do as it does."""

        def __init__(self, world_size: int, rank: int) -> None:
            pass

        def agree(self, code: int) -> list[int]:
            return [code] * 4

        def close(self) -> None:
            pass

    scales = []
    env.set_env(world_size=4, rank=1, local_rank=1)
    monkeypatch.setattr("persia.ctx.run.Ranks", Alone)
    monkeypatch.setattr(TrainCtx, "_join_ranks", lambda ctx: None)
    for reduction in ("mean", "sum"):
        fake = FakeWorker()
        with make_ctx(embedding_worker=fake, embedding_gradient_reduction=reduction) as ctx:
            for batch in DataLoader([make_batch(0)]):
                step(ctx, batch)
        scales.append(fake.gradients[0].scale)
        assert fake.update_ids[0][0] % 2**16 == 1  # the rank
    assert scales == [4.0, 1.0]


def test_w13_a_context_that_is_entered_again_repeats_no_update_id(
    worker: FakeWorker, make_ctx: MakeCtx, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Servers would take such an update for a repetition, and leave it out.
    monkeypatch.setenv("PERSIA_EMBEDDING_WORKERS", "ipc://nowhere")
    monkeypatch.setattr(Connection, "to_job", lambda *given: Connection(worker))
    ctx = make_ctx(embedding_worker=None)
    for _ in range(2):
        with ctx:
            for batch in DataLoader([make_batch(0), make_batch(1)]):
                step(ctx, batch)
    assert len(set(worker.update_ids)) == 4


def test_a_context_that_fails_as_it_is_entered_can_be_entered_again(
    make_ctx: MakeCtx, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*given: object) -> None:
        raise NotADirectoryError("tensorboard")

    ctx = make_ctx()
    with monkeypatch.context() as patch:
        patch.setattr(TrainingRecord, "begin", fail)
        with pytest.raises(NotADirectoryError), ctx:
            pass
    connection = ctx._connected()
    assert (connection.backward, connection.folders) == (None, None)
    with ctx:
        step(ctx, ctx.get_embedding_from_data(make_batch(4)))


def test_updates_are_sent_though_folders_cannot_be_left(
    make_ctx: MakeCtx, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(folders: JobFolders) -> None:
        raise OSError("stale handle")

    monkeypatch.setattr(JobFolders, "release", fail)
    with pytest.raises(OSError, match="stale handle"), make_ctx() as ctx:
        step(ctx, ctx.get_embedding_from_data(make_batch(4)))
    # That no thread is left is what every test here is looked through for.
    assert ctx.backward_engine is None


def test_ranks_without_rounds_cannot_be_reproducible(
    make_ctx: MakeCtx, monkeypatch: pytest.MonkeyPatch
) -> None:
    env.set_env(world_size=2, rank=0, local_rank=0)
    monkeypatch.setattr(TrainCtx, "_join_ranks", lambda ctx: None)
    ctx = make_ctx()
    with pytest.raises(ConfigError, match="drop_last=False: expected reproducible=False"):
        ctx.join_ranks(reproducible=True)
    env.set_env(world_size=1, rank=0, local_rank=0)
    with make_ctx() as alone:
        loader = DataLoader([make_batch(0)], reproducible=True, drop_last=False)
        assert len([step(alone, batch) for batch in loader]) == 1
