"""Connecting: servers that are not there, or not ready."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from persia import env
from persia.ctx import EmbeddingCtx, InferCtx, TrainCtx, cnt_ctx, eval_ctx
from persia.data import DataLoader
from persia.embedding import EmbeddingConfig
from persia.embedding.optim import SGD, Adagrad
from persia.errors import ConfigError, ServiceTimeout, ServiceUnavailable
from tests.training.conftest import MakeCtx, Net, embeddings_of, train
from tests.training.fakes import DIM, SpyWorker, make_batch


def test_wait_servers_ready_ends(make_ctx: MakeCtx, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("persia.ctx.connection.READY_S", 0.0)
    monkeypatch.setattr("persia.ctx.connection.ASK_AGAIN_S", 0.0)
    ctx = make_ctx()
    with pytest.raises(ServiceTimeout, match="not ready in 0 s"):
        ctx.wait_servers_ready()


def test_several_ranks_need_servers() -> None:
    env.set_env(world_size=2, rank=0, local_rank=0)
    with pytest.raises(ConfigError, match="WORLD_SIZE is 2"):
        eval_ctx(embedding_config={"slots_config": {"user": {"dim": 4}}})


def test_servers_that_are_not_there_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERSIA_RPC_TIMEOUT", "0.2")
    monkeypatch.setenv("PERSIA_EMBEDDING_WORKERS", "ipc:///nowhere/1")
    ctx = eval_ctx(embedding_config={"slots_config": {"user": {"dim": 4}}})
    with pytest.raises(ServiceUnavailable, match="ipc:///nowhere/1"):
        ctx.__enter__()
    assert cnt_ctx() is None


def test_a_context_that_was_never_entered_waits_for_updates_of_a_later_one(
    worker: SpyWorker, make_ctx: MakeCtx, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed = []
    reader = eval_ctx(model=Net(), embedding_worker=worker)
    with make_ctx() as ctx:
        engine = ctx.backward_engine
        assert engine is not None
        with monkeypatch.context() as patch:
            patch.setattr(engine, "flush", lambda: flushed.append("flush"))
            patch.setattr(engine, "wait", lambda: flushed.append("wait"))
            reader.get_embedding_size()
            reader._connected().connection.wait()
        assert flushed == ["flush", "wait"]
    reader.get_embedding_size()
    assert reader._connected().connection.backward is None


def test_w52_two_contexts_in_one_process_share_nothing(make_ctx: MakeCtx) -> None:
    one, other = SpyWorker(), SpyWorker()
    with make_ctx(embedding_worker=one) as first:
        train(first, [make_batch(0)])
        with make_ctx(embedding_worker=other) as second:
            assert second.get_embedding_size() == [0]
            train(second, [make_batch(1)])
        train(first, [make_batch(2)])
    assert one.of("update") == [0, 1]
    assert other.of("update") == [0]


def test_a_batch_of_another_context_is_not_trained(make_ctx: MakeCtx) -> None:
    """A DataLoader takes the context that was entered last, not the one that is called."""
    one, other = SpyWorker(), SpyWorker()
    with make_ctx(embedding_worker=one) as first:
        with (
            make_ctx(embedding_worker=other) as second,
            pytest.raises(ConfigError, match="expected a batch that was looked up in it, got"),
        ):
            train(first, [make_batch(0)])
        assert second.stats()["batches"] == 0
        train(first, [make_batch(0)])
    assert (one.refs, other.refs) == ({}, {})
    assert (one.of("update"), other.of("update")) == ([0], [])


def test_train_ctx_configures_on_entry(worker: SpyWorker, make_ctx: MakeCtx) -> None:
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


def test_w09_evaluation_configures_nothing(worker: SpyWorker, make_ctx: MakeCtx) -> None:
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


def test_an_evaluation_context_follows_the_one_it_is_entered_in(make_ctx: MakeCtx) -> None:
    one, other = SpyWorker(), SpyWorker()
    reader = eval_ctx(model=Net())
    with make_ctx(embedding_worker=one), reader:
        assert reader.embedding_worker is one
    assert reader.embedding_worker is one
    with make_ctx(embedding_worker=other), reader:
        assert reader.embedding_worker is other
    with reader:
        assert reader.embedding_worker is other
    with (
        make_ctx(embedding_worker=one) as ctx,
        eval_ctx(model=ctx.model),
        eval_ctx(model=ctx.model) as innermost,
    ):
        assert innermost.embedding_worker is one
    given = eval_ctx(model=Net(), embedding_worker=one)
    with make_ctx(embedding_worker=other), given:
        assert given.embedding_worker is one


@pytest.mark.parametrize("ctx", [eval_ctx(model=Net()), InferCtx(model=Net())])
def test_context_without_embeddings_says_how_to_get_them(ctx: EmbeddingCtx) -> None:
    with pytest.raises(ConfigError, match="has no embeddings yet"):
        ctx.get_embedding_size()
    message = (
        r"enter it inside the `with TrainCtx\(...\)` .* embedding_config=.* "
        r"PERSIA_EMBEDDING_CONFIG, and load_checkpoint\(\)"
    )
    with pytest.raises(ConfigError, match=message), ctx:
        pass
    assert cnt_ctx() is None


def test_an_own_store_of_an_evaluation_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = {"slots_config": {"user": {"dim": 4}, "tags": {"dim": 4}}}
    with eval_ctx(embedding_config=config) as ctx:
        assert "which is empty" not in caplog.text  # a checkpoint may come first
        for _ in range(2):
            batch = ctx.get_embedding_from_data(make_batch(0, names=("user",)))
        assert not embeddings_of(batch)[0].any()
    (line,) = caplog.messages
    assert "looks up in an embedding store of its own, which is empty" in line
    assert "load_checkpoint() first" in line


def test_an_own_store_that_was_loaded_is_not_warned_of(
    make_ctx: MakeCtx, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = {"slots_config": {"user": {"dim": 4}, "tags": {"dim": 4}}}
    with make_ctx(embedding_worker=None, embedding_config=config) as trained:
        train(trained, [make_batch(0)])
        trained.dump_embedding(tmp_path)
    with InferCtx(embedding_config=config) as serving:
        serving.load_embedding(tmp_path)
        serving.get_embedding_from_data(make_batch(0))
        assert len(list(DataLoader([make_batch(1)]))) == 1
    assert "of its own" not in caplog.text


CONFIG = {"slots_config": {"user": {"dim": DIM}, "tags": {"dim": DIM}}}


def evaluate(ctx: TrainCtx) -> None:
    with eval_ctx(model=ctx.model) as evaluation:
        for number in range(2):
            evaluation.get_embedding_from_data(make_batch(number, requires_grad=False))


@pytest.mark.parametrize("use", [evaluate, lambda ctx: train(ctx, [make_batch(0)])])
def test_a_trained_model_in_a_context_without_its_rows_is_warned_of(
    make_ctx: MakeCtx, tmp_path: Path, caplog: pytest.LogCaptureFixture, use: Any
) -> None:
    own: dict[str, Any] = {"embedding_worker": None, "embedding_config": CONFIG}
    with make_ctx(**own) as first:
        train(first, [make_batch(0)])
        evaluate(first)
        first.dump_checkpoint(tmp_path)
    with first:  # has its rows
        use(first)
    with make_ctx(model=first.model, **own) as loaded:
        loaded.load_checkpoint(tmp_path)
        use(loaded)
    assert "has no rows" not in caplog.text
    with make_ctx(model=first.model, **own) as second:
        assert "has no rows" not in caplog.text  # a checkpoint may come first
        use(second)
        use(second)
    (line,) = [line for line in caplog.messages if "has no rows" in line]
    assert line.startswith("the model was trained in an earlier TrainCtx, and this TrainCtx")
    assert "enter the same TrainCtx again, or dump_checkpoint() there and load" in line


def test_an_evaluation_before_training_is_said_to_read_zeros(
    make_ctx: MakeCtx, caplog: pytest.LogCaptureFixture
) -> None:
    """As after a model's state dict was loaded alone."""
    with make_ctx(embedding_worker=None, embedding_config=CONFIG) as ctx:
        evaluate(ctx)
        evaluate(ctx)
        train(ctx, [make_batch(0)])
        evaluate(ctx)
    (line,) = [line for line in caplog.messages if "has no rows" in line]
    assert line.startswith("this is an evaluation before any training")
    assert "a state dict has none" in line
