"""The embedding-worker of embedded mode."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest

from persia._cluster.embedded import build_embedding_worker
from persia._core.ids.feature_batch import FeatureBatch
from persia._rpc.messages import IDFeatures
from persia.config import EmbeddingSchema, GlobalConfig
from persia.errors import ConfigError

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


def test_kernels_that_do_not_exist_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERSIA_ISA", "none such")
    with pytest.raises(ConfigError, match="none such"):
        build_embedding_worker(SCHEMA, GlobalConfig.load(None))
