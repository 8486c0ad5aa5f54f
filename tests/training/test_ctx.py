"""Contexts: settings, nesting, modes, and what they share."""

from __future__ import annotations

import logging
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import persia.ctx
from persia import env
from persia._files.writer_lock import JobFolders
from persia._training import ranks
from persia._training.ranks import Ranks
from persia.ctx import (
    BaseCtx,
    EmbeddingCtx,
    InferCtx,
    PreprocessMode,
    TrainCtx,
    cnt_ctx,
    eval_ctx,
)
from persia.ctx.connection import embeddings_of
from persia.data import DataLoader
from persia.embedding import EmbeddingConfig
from persia.embedding.optim import SGD, Adagrad
from persia.errors import ConfigError, DataTypeError, ServiceTimeout, ServiceUnavailable

from .conftest import MakeCtx, Net, step
from .fakes import FakeWorker, make_batch

ROOT = Path(__file__).parents[2]


def test_modes_have_the_originals_numbers() -> None:
    assert [(mode.name, mode.value) for mode in PreprocessMode] == [
        ("TRAIN", 1),
        ("EVAL", 2),
        ("INFERENCE", 3),
    ]


def test_contexts_nest_and_restore(make_ctx: MakeCtx) -> None:
    assert cnt_ctx() is None
    with make_ctx() as outer:
        assert cnt_ctx() is outer
        assert outer.origin_context is None
        with eval_ctx(model=outer.model) as inner:
            assert cnt_ctx() is inner
            assert inner.origin_context is outer
        assert cnt_ctx() is outer
        with pytest.raises(KeyError), eval_ctx(model=outer.model):
            raise KeyError("inside")
        assert cnt_ctx() is outer
    assert cnt_ctx() is None


def test_a_context_is_entered_once_at_a_time_and_any_number_of_times(
    worker: FakeWorker, make_ctx: MakeCtx
) -> None:
    ctx = make_ctx()
    for _ in range(2):
        with ctx:
            with pytest.raises(ConfigError, match="entered already"), ctx:
                pass
            for batch in DataLoader([make_batch(0), make_batch(1)]):
                step(ctx, batch)
    assert sorted(worker.of("update")) == [0, 1, 2, 3]


def test_w52_two_contexts_in_one_process_share_nothing(make_ctx: MakeCtx) -> None:
    one, other = FakeWorker(), FakeWorker()
    with make_ctx(embedding_worker=one) as first:
        for batch in DataLoader([make_batch(0)]):
            step(first, batch)
        with make_ctx(embedding_worker=other) as second:
            assert second.get_embedding_size() == [0]
            for batch in DataLoader([make_batch(1)]):
                step(second, batch)
        for batch in DataLoader([make_batch(2)]):
            step(first, batch)
    assert one.of("update") == [0, 1]
    assert other.of("update") == [0]


def test_failing_to_enter_leaves_no_context(worker: FakeWorker, make_ctx: MakeCtx) -> None:
    def refuse(settings: object) -> None:
        raise ConfigError("no such optimizer")

    worker.register_optimizer = refuse  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match="no such optimizer"), make_ctx():
        pass
    assert cnt_ctx() is None


# --- configuring ----------------------------------------------------------------------------


def test_train_ctx_configures_on_entry(worker: FakeWorker, make_ctx: MakeCtx) -> None:
    config = EmbeddingConfig((-0.5, 0.5), admit_probability=0.25, weight_bound=3)
    ctx = make_ctx(embedding_config=config, embedding_optimizer=Adagrad(lr=0.3))
    assert worker.configured == []
    with ctx:
        assert worker.configured == [config.settings()]
        assert worker.optimizers == [Adagrad(lr=0.3).settings()]
        ctx.wait_servers_ready()
        other = EmbeddingConfig(weight_bound=1)
        ctx.configure_embedding_parameter_servers(other)
        assert worker.configured[-1] == other.settings()
        SGD(lr=0.125).apply()
        assert worker.optimizers[-1] == SGD(lr=0.125).settings()


def test_w09_evaluation_configures_nothing(worker: FakeWorker, make_ctx: MakeCtx) -> None:
    with make_ctx(embedding_config=EmbeddingConfig((-0.5, 0.5))) as ctx:
        before = (list(worker.configured), list(worker.optimizers))
        with eval_ctx(model=ctx.model) as inner:
            for batch in DataLoader([make_batch(0)]):
                inner.forward(batch)
        with eval_ctx(ctx.model, EmbeddingConfig((-0.1, 0.1))):
            pass
        with InferCtx(model=ctx.model) as serving:  # W-43: the original could not enter it
            serving.wait_for_serving()
            for batch in DataLoader([make_batch(0)]):
                assert serving.forward(batch)[1] is None
        assert (worker.configured, worker.optimizers) == before
        assert worker.rows == {}


def test_evaluation_shares_the_surrounding_embeddings(
    worker: FakeWorker, make_ctx: MakeCtx
) -> None:
    with make_ctx() as ctx:
        for batch in DataLoader([make_batch(0)]):
            step(ctx, batch)
        with eval_ctx(model=ctx.model) as inner:
            assert inner.embedding_worker is worker
            assert inner.common_context is worker
            (batch,) = DataLoader([make_batch(0)])
            user = batch.embedding_tensors[0]
            assert isinstance(user, torch.Tensor)
            ids = make_batch(0).features[0]
            assert torch.equal(
                user[0], torch.from_numpy(worker.rows["user", int(ids.distinct[0])])
            )
            with eval_ctx(model=ctx.model) as innermost:
                assert innermost.embedding_worker is worker
    with eval_ctx(model=ctx.model, embedding_worker=ctx.embedding_worker) as later:
        assert later.get_embedding_size() == [len(worker.rows)]


def test_evaluation_between_steps_changes_no_training_bit(make_ctx: MakeCtx) -> None:
    runs = []
    for evaluates in (False, True):
        fake = FakeWorker()
        with make_ctx(embedding_worker=fake) as ctx:
            data = [make_batch(number) for number in range(12)]
            for batch in DataLoader(data, reproducible=True, embedding_staleness=1):
                step(ctx, batch)
                if evaluates:
                    with eval_ctx(model=ctx.model) as inner:
                        for other in DataLoader([make_batch(99)], embedding_staleness=1):
                            inner.forward(other)
        runs.append({key: row.tobytes() for key, row in fake.rows.items()})
        assert fake.update_ids[-1][1] == 11
    assert runs[0] == runs[1]


def test_evaluation_inside_a_training_context_does_not_shift_its_batch_ids(
    worker: FakeWorker, make_ctx: MakeCtx
) -> None:
    # Admission by probability draws by batch id.
    with make_ctx() as ctx:
        for number in range(3):
            ctx.get_embedding_from_data(make_batch(9, requires_grad=False))
            step(ctx, ctx.get_embedding_from_data(make_batch(number)))
    assert worker.of("lookup") == [0, 1, 2]
    assert [number for _, number in sorted(worker.update_ids)] == [0, 1, 2]


def test_an_evaluation_context_follows_the_one_it_is_entered_in(make_ctx: MakeCtx) -> None:
    one, other = FakeWorker(), FakeWorker()
    reader = eval_ctx(model=Net())
    with make_ctx(embedding_worker=one), reader:
        assert reader.embedding_worker is one
    assert reader.embedding_worker is one
    with make_ctx(embedding_worker=other), reader:
        assert reader.embedding_worker is other
    with reader:
        assert reader.embedding_worker is other
    given = eval_ctx(model=Net(), embedding_worker=one)
    with make_ctx(embedding_worker=other), given:
        assert given.embedding_worker is one


def test_context_without_embeddings_says_how_to_get_them() -> None:
    ctx = eval_ctx(model=Net())
    with pytest.raises(ConfigError, match="has no embeddings yet"):
        ctx.get_embedding_size()
    with pytest.raises(ConfigError, match=r"embedding_config=.*PERSIA_EMBEDDING_CONFIG"), ctx:
        pass
    assert cnt_ctx() is None


def test_wait_servers_ready_gives_up(
    worker: FakeWorker, make_ctx: MakeCtx, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("persia.ctx.ready.READY_S", 0.0)
    monkeypatch.setattr("persia.ctx.ready.ASK_AGAIN_S", 0.0)
    ctx = make_ctx()
    with pytest.raises(ServiceTimeout, match="not ready in 0 s"):
        ctx.wait_servers_ready()


def test_clear_embeddings(worker: FakeWorker, make_ctx: MakeCtx) -> None:
    with make_ctx() as ctx:
        for batch in DataLoader([make_batch(0)]):
            step(ctx, batch)
        assert ctx.get_embedding_size() == [len(worker.rows)]
        assert worker.rows
        ctx.clear_embeddings()
        assert ctx.get_embedding_size() == [0]


# --- settings ---------------------------------------------------------------------------------


def test_w44_defaults_work_without_rank_and_without_cuda(make_ctx: MakeCtx) -> None:
    ctx = make_ctx()
    assert (ctx.world_size, ctx.rank_id) == (1, 0)
    assert ctx.mixed_precision is False
    assert ctx.grad_scaler is None
    assert ctx.device_id is None
    assert make_ctx(device_id=-1).device_id is None
    assert ctx.grad_queue is None
    with ctx:
        assert ctx.grad_queue is not None
        assert len(ctx.grad_queue) == 0


def test_original_positional_order() -> None:
    fake, model = FakeWorker(), Net()
    dense = torch.optim.SGD(model.parameters(), lr=0.1)
    ctx = TrainCtx(
        SGD(lr=1), dense, 4, 10, 8, 60, True, False, None, model, embedding_worker=fake
    )
    assert ctx.model is model
    assert ctx.dense_optimizer is dense


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"embedding_optimizer": None}, "embedding_optimizer: expected one of"),
        ({"dense_optimizer": None}, "TrainCtx needs dense_optimizer="),
        ({"grad_scalar_update_factor": 0}, "grad_scalar_update_factor must be above 0, got 0"),
        ({"backward_buffer_size": 0}, "backward_buffer_size must be at least 1, got 0"),
        ({"backward_workers_size": 0}, "backward_workers_size must be at least 1, got 0"),
        ({"embedding_gradient_reduction": "max"}, "must be 'mean' or 'sum', got 'max'"),
        ({"device_id": 1000}, r"device_id: expected one of the \d+ CUDA devices.* got 1000"),
    ],
)
def test_bad_settings_name_themselves(
    make_ctx: MakeCtx, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make_ctx(**options)


def test_train_ctx_needs_a_model(worker: FakeWorker) -> None:
    dense = torch.optim.SGD(Net().parameters(), lr=0.1)
    with pytest.raises(ConfigError, match="TrainCtx needs model="):
        TrainCtx(SGD(lr=1), dense, embedding_worker=worker)


def test_forward_needs_a_model(worker: FakeWorker) -> None:
    with EmbeddingCtx(PreprocessMode.EVAL, embedding_worker=worker) as ctx:
        batch = ctx.get_embedding_from_data(make_batch(0))
        ctx.prepare_features(batch)
        with pytest.raises(ConfigError, match="needs model="):
            ctx.forward(batch)


def test_several_ranks_need_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    env.reload_env()
    with pytest.raises(ConfigError, match="WORLD_SIZE is 2"):
        eval_ctx(embedding_config={"slots_config": {"user": {"dim": 4}}})


def test_servers_that_are_not_there_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERSIA_RPC_TIMEOUT", "0.2")
    with pytest.raises(ServiceUnavailable, match="ipc:///nowhere/0"):
        InferCtx(["ipc:///nowhere/0"]).__enter__()
    monkeypatch.setenv("PERSIA_EMBEDDING_WORKERS", "ipc:///nowhere/1")
    ctx = eval_ctx(embedding_config={"slots_config": {"user": {"dim": 4}}})
    with pytest.raises(ServiceUnavailable, match="ipc:///nowhere/1"):
        ctx.__enter__()
    assert cnt_ctx() is None


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
    monkeypatch.setattr(ranks, "Ranks", Alone)
    monkeypatch.setattr(TrainCtx, "_join_ranks", lambda ctx: None)
    for reduction in ("mean", "sum"):
        fake = FakeWorker()
        with make_ctx(embedding_worker=fake, embedding_gradient_reduction=reduction) as ctx:
            for batch in DataLoader([make_batch(0)]):
                step(ctx, batch)
        scales.append(fake.gradients[0].scale)
        assert fake.update_ids[0][0] % 2**16 == 1  # the rank
    assert scales == [4.0, 1.0]


def test_base_ctx_is_a_context_and_nothing_else() -> None:
    with BaseCtx(threadpool_worker_size=3) as ctx:
        assert cnt_ctx() is ctx
        with pytest.raises(ConfigError, match="the current one is BaseCtx"):
            iter(DataLoader([make_batch(0)]))
        with pytest.raises(ConfigError, match="got BaseCtx"):
            SGD(lr=0.1).apply()


def test_names_are_of_the_module_that_has_them() -> None:
    for name in persia.ctx.__all__:
        assert getattr(persia.ctx, name).__module__ == "persia.ctx"
    assert pickle.loads(pickle.dumps(PreprocessMode.EVAL)) is PreprocessMode.EVAL


def test_ctx_is_imported_without_torch() -> None:
    code = "import sys, persia.ctx; persia.ctx.DataCtx(); sys.exit('torch' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False, timeout=60)
    assert ran.returncode == 0


def test_an_own_store_of_an_evaluation_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with eval_ctx(embedding_config={"slots_config": {"user": {"dim": 4}}}) as ctx:
        batch = ctx.get_embedding_from_data(make_batch(0, names=("user",)))
        (user,) = batch.embedding_tensors
        assert isinstance(user, torch.Tensor)
        assert not user.any()
    assert "begins empty" in caplog.text
    assert "embedded mode: 1 parameter server(s)" in caplog.text


def test_w13_a_context_that_is_entered_again_repeats_no_update_id(
    worker: FakeWorker, make_ctx: MakeCtx, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Servers would take such an update for a repetition, and leave it out.
    class Connection:
        def close(self) -> None:
            """Leave the worker as it is, as servers do."""

    def connect(ctx: Any) -> Any:
        ctx._workers = Connection()
        return embeddings_of(worker)

    monkeypatch.setenv("PERSIA_EMBEDDING_WORKERS", "ipc://nowhere")
    monkeypatch.setattr(TrainCtx, "_connect", connect)
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
        patch.setattr(TrainCtx, "_record", fail)
        with pytest.raises(NotADirectoryError), ctx:
            pass
    embeddings = embeddings_of(ctx.embedding_worker)
    assert (embeddings.engine, embeddings.folders) == (None, None)
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


def test_addresses_given_to_an_infer_ctx_come_before_the_context_around_it(
    make_ctx: MakeCtx, monkeypatch: pytest.MonkeyPatch
) -> None:
    with make_ctx():
        monkeypatch.setenv("PERSIA_RPC_TIMEOUT", "0.2")
        with pytest.raises(ServiceUnavailable, match="ipc:///nowhere/0"):
            InferCtx(["ipc:///nowhere/0"]).__enter__()


def test_a_batch_without_embeddings_is_refused_by_its_type(make_ctx: MakeCtx) -> None:
    with (
        make_ctx() as ctx,
        pytest.raises(DataTypeError, match=r"as DataLoader .* got PersiaBatch"),
    ):
        ctx.forward(make_batch())  # type: ignore[arg-type]
