"""The embedding-worker of embedded mode."""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import numpy as np
import pytest

from persia._cluster.embedded import build_embedding_worker
from persia._core.ids.feature_batch import FeatureBatch
from persia._rpc.messages import IDFeatures, PooledOutput
from persia._worker.service import EmbeddingWorker
from persia.config import EmbeddingSchema, GlobalConfig
from persia.errors import ConfigError, ServiceBusy
from tests.support.saving import dump, held_load
from tests.support.services import ADAGRAD, settings
from tests.support.waiting import PATIENCE_S

SCHEMA = EmbeddingSchema.load({"slots_config": {"user": {"dim": 4}}})


def test_servers_are_as_many_as_configured_and_batches_do_not_expire() -> None:
    config = GlobalConfig.load({"embedded_config": {"num_servers": 3}})
    with contextlib.closing(build_embedding_worker(SCHEMA, config)) as worker:
        numbers = [(server.replica_index, server.replica_size) for server in worker.servers]
        assert numbers == [(0, 3), (1, 3), (2, 3)]
        user = FeatureBatch.from_single("user", np.array([1], np.uint64))
        ref = worker.register(IDFeatures((user,), 0, requires_grad=True))
        assert worker.register(IDFeatures((user,), 0, requires_grad=True)) == ref
        assert worker.stats()["in_flight"] == 1


def evaluate(worker: EmbeddingWorker, ids: list[int]) -> bytes:
    user = FeatureBatch.from_single("user", np.array(ids, np.uint64))
    (output,) = worker.lookup_direct(IDFeatures((user,), 0, requires_grad=False)).outputs
    assert isinstance(output, PooledOutput)
    return output.values.tobytes()


@pytest.mark.parametrize("count", [1, 2])
def test_evaluation_waits_for_a_load_as_a_client_would(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    config = GlobalConfig.load({"embedded_config": {"num_servers": count}})
    with contextlib.closing(build_embedding_worker(SCHEMA, config)) as worker:
        worker.configure(settings())
        worker.register_optimizer(ADAGRAD)
        ids = list(range(1, 20))
        user = FeatureBatch.from_single("user", np.array(ids, np.uint64))
        worker.release(worker.lookup_direct(IDFeatures((user,), 0, True)).ref or 0)
        before = evaluate(worker, ids)
        assert any(before)
        dump(worker, tmp_path)
        with ThreadPoolExecutor() as pool:
            with held_load(worker, tmp_path, monkeypatch):
                monkeypatch.setenv("PERSIA_RPC_TIMEOUT", "0.05")
                with pytest.raises(ServiceBusy, match="a load is replacing its rows"):
                    evaluate(worker, ids)
                monkeypatch.setenv("PERSIA_RPC_TIMEOUT", str(PATIENCE_S))
                answers = [pool.submit(evaluate, worker, ids) for _ in range(2)]
                assert not wait(answers, 0.05).done
            assert [one.result(PATIENCE_S) for one in answers] == [before] * 2


def test_kernels_that_do_not_exist_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERSIA_ISA", "none such")
    with pytest.raises(ConfigError, match="none such"):
        build_embedding_worker(SCHEMA, GlobalConfig.load(None))
