"""What the original's own Python tests assert, restated where they need no servers.

Its test of a whole service and its DataCtx is restated with the contexts.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

from persia import env
from persia.embedding.data import (
    IDTypeFeature,
    IDTypeFeatureWithSingleID,
    Label,
    NonIDTypeFeature,
    PersiaBatch,
)
from persia.prelude import check_pyarray_dtype_valid
from persia.service import get_embedding_worker_services

DTYPES = (bool, np.int8, np.int16, np.int32, np.int64, np.float32, np.float64, np.uint8)


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "REPLICA_INDEX", "REPLICA_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("EMBEDDING_WORKER_SERVICE", raising=False)
    monkeypatch.setattr(env, "_place", None)


def test_rank_env(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0)):
        monkeypatch.setitem(os.environ, name, str(value))
    env.reload_env()
    assert (env.get_rank(), env.get_world_size(), env.get_local_rank()) == (0, 1, 0)


def test_replica_env(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("REPLICA_INDEX", 0), ("REPLICA_SIZE", 1)):
        monkeypatch.setitem(os.environ, name, str(value))
    env.reload_env()
    assert (env.get_replica_index(), env.get_replica_size()) == (0, 1)


def test_service(monkeypatch: pytest.MonkeyPatch) -> None:
    assert get_embedding_worker_services() == ["embedding_worker:8887"]
    monkeypatch.setenv("EMBEDDING_WORKER_SERVICE", "localhost:8080")
    assert get_embedding_worker_services() == ["localhost:8080"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes_convert(dtype: type) -> None:
    array: np.ndarray[Any, Any] = np.zeros((5, 2), dtype)
    check_pyarray_dtype_valid(array, array.dtype)
    for cls in (NonIDTypeFeature, Label):
        item = cls(array, "name")
        assert (item.batch_size, len(item), item.name) == (5, 5, "name")


def test_id_features_and_batch() -> None:
    many = IDTypeFeature("many", [np.array([1, 2], np.uint64) for _ in range(5)])
    single = IDTypeFeatureWithSingleID("single", np.arange(5, dtype=np.uint64))
    assert (many.batch_size, single.batch_size) == (5, 5)
    with pytest.raises(RuntimeError):
        PersiaBatch([many, single], requires_grad=True)
    batch = PersiaBatch(
        [many, single],
        non_id_type_features=[NonIDTypeFeature(np.zeros((5, 2), np.float32))],
        labels=[Label(np.zeros(5, bool))],
        requires_grad=True,
        meta=b"meta",
    )
    assert batch.batch_size == 5
    assert isinstance(batch.to_bytes(), bytes)
