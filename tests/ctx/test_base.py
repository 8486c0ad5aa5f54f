"""What every context is: nesting, names, and the calls of the original."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch

import persia.ctx
from persia._training.batch import DeviceTransfer, NamedList, PersiaTrainingBatch
from persia.ctx import BaseCtx, InferCtx, PreprocessMode, cnt_ctx, eval_ctx
from persia.data import DataLoader
from persia.embedding import EmbeddingConfig
from persia.embedding.optim import SGD
from persia.errors import ConfigError
from tests.training.conftest import MakeCtx, batches, train
from tests.training.fakes import SpyWorker, make_batch


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


def test_an_inner_context_has_the_device_of_the_outer_one(make_ctx: MakeCtx) -> None:
    class Meta(DeviceTransfer):
        """A device that every machine has."""

        def stage(self, batch: PersiaTrainingBatch, outputs: Any) -> None:
            super().stage(batch, outputs)
            tensors = [torch.zeros(1, device="meta") for _ in outputs]
            batch.embedding_tensors = NamedList(tensors, batch.feature_names)

    def devices(ctx: Any) -> set[str]:
        ctx._connected()._transfers[0] = Meta(torch.device("cpu"))  # number 0
        found = [ctx.get_embedding_from_data(make_batch(0)), *DataLoader(batches(2))]
        return {one.device.type for batch in found for one in batch.embedding_tensors}

    made = eval_ctx()
    with make_ctx() as outer:
        outer.device_id = 0
        with made:
            assert devices(made) == {"meta"}
        with InferCtx() as serving:
            assert devices(serving) == {"meta"}
        with eval_ctx(device_id=-1) as inner:
            assert devices(inner) == {"cpu"}
        outer.device_id = None
        with made:
            assert devices(made) == {"cpu"}


def test_a_context_is_entered_once_at_a_time(worker: SpyWorker, make_ctx: MakeCtx) -> None:
    ctx = make_ctx()
    for _ in range(2):
        with ctx:
            with pytest.raises(ConfigError, match="entered already"), ctx:
                pass
            train(ctx, batches(2))
    assert sorted(worker.of("update")) == [0, 1, 2, 3]


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


def test_the_common_context_of_the_original(worker: SpyWorker, make_ctx: MakeCtx) -> None:
    with make_ctx() as ctx:
        common = ctx.common_context
        common.init_nats_publisher(1)
        common.configure_embedding_parameter_servers(-0.5, 0.5, 0.25, True, 3)
        expected = EmbeddingConfig((-0.5, 0.5), 0.25, 3)
        assert ctx.embedding_config == expected
        assert worker.configured[-1] == expected.settings()
        common.configure_embedding_parameter_servers(-0.5, 0.5, 1.0, False, 3)
        assert ctx.embedding_config.weight_bound == 0
        common.wait_servers_ready()
    with BaseCtx() as base:
        base.common_context.init_nats_publisher()
        base.common_context.wait_servers_ready()
        with pytest.raises(ConfigError, match="BaseCtx has no embeddings"):
            base.common_context.configure_embedding_parameter_servers(-1, 1, 1.0, True, 10)
