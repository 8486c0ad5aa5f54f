"""The batch that is filled piece by piece is the batch of today."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from persia.compat.data import Dataloader, PersiaDataset, PyPersiaBatchData, Sender
from persia.ctx import eval_ctx
from persia.data import DataLoader
from persia.embedding.data import IDTypeFeature, Label, NonIDTypeFeature, PersiaBatch
from persia.errors import DataError, DataTypeError
from tests.training.fakes import SpyWorker

IDS = [np.array(ids, np.uint64) for ids in ([1, 2], [], [3])]
DENSE = np.arange(6, dtype=np.float32).reshape(3, 2)
TARGET = np.array([[1], [0], [1]], np.float32)


def test_each_way_to_fill_it_gives_the_same_bytes() -> None:
    want = PersiaBatch(
        [IDTypeFeature("items", IDS)], [NonIDTypeFeature(DENSE)], [Label(TARGET)], meta=b"m"
    ).to_bytes()
    flat, offsets = np.array([1, 2, 3], np.uint64), np.array([0, 2, 2, 3])
    ids: list[Callable[[Any], None]] = [
        lambda batch: batch.add_sparse([("items", IDS)]),
        lambda batch: batch.add_sparse([("items", IDS)], requires_grad=True),
        lambda batch: batch.add_id_type_features([("items", IDS)]),
        lambda batch: batch.add_id_type_feature(IDS, "items"),
        lambda batch: batch.add_map_sparse("items", flat, offsets),
    ]
    dense: list[Callable[[Any], None]] = [
        lambda batch: batch.add_dense([DENSE]),
        lambda batch: batch.add_dense_f32(DENSE),
        lambda batch: batch.add_non_id_type_feature(DENSE),
        lambda batch: batch.add_non_id_type_feature([DENSE]),
        lambda batch: batch.add_non_id_type_features_f32(DENSE),
        lambda batch: batch.add_non_id_type_feature(DENSE, np.float32),
    ]
    labels: list[Callable[[Any], None]] = [
        lambda batch: batch.add_target(TARGET),
        lambda batch: batch.add_label(TARGET),
        lambda batch: batch.add_label(TARGET, np.float32),
    ]
    for number in range(6):
        batch = PyPersiaBatchData()
        for ways in (ids, dense, labels):
            ways[number % len(ways)](batch)
        batch.add_meta(b"m")
        assert batch.to_bytes() == want
        assert isinstance(batch, PersiaBatch)
        assert (batch.batch_size, batch.data) == (3, batch)


def test_it_may_be_added_to_after_it_was_read() -> None:
    batch = PyPersiaBatchData()
    batch.add_map_dense("price", DENSE)
    batch.add_id_type_feature_with_single_id(np.arange(3, dtype=np.uint64), "user")
    assert not batch.requires_grad  # without a label nothing is trained
    batch.add_target(TARGET)
    batch.add_target(TARGET)
    assert batch.requires_grad
    batch.converted_id_type_features2embedding_tensor(requires_grad=False)
    assert not batch.requires_grad
    assert len(batch.labels) == 2
    batch.add_dense_f64(np.zeros((3, 3)))
    batch.add_dense_i32(np.zeros((3, 1), np.int32))
    batch.add_dense_i64(np.zeros((3, 1), np.int64))
    dtypes = [each.data.dtype for each in batch.non_id_type_features]
    assert dtypes == [np.float32, np.float64, np.int32, np.int64]
    assert batch.non_id_type_features[0].name == NonIDTypeFeature(DENSE, "price").name


def test_what_does_not_fit_is_named() -> None:
    batch = PyPersiaBatchData()
    with pytest.raises(DataTypeError, match="dense: expected an array of float32, got float64"):
        batch.add_dense([DENSE.astype(np.float64)])
    with pytest.raises(DataError, match=r"target: expected 2 dimensions, got 1; reshape"):
        batch.add_target(TARGET[:, 0])
    with pytest.raises(DataTypeError, match="expected an array of int64, got float32"):
        batch.add_non_id_type_feature(DENSE, np.int64)
    with pytest.raises(DataTypeError, match="meta: expected bytes, got str"):
        batch.add_meta("{}")  # type: ignore[arg-type]
    with pytest.raises(DataError, match="id_type_features: expected at least one, got none"):
        batch.to_bytes()
    batch.add_sparse([("items", IDS)])
    batch.add_target(TARGET[:2])
    with pytest.raises(DataError, match="expected 3 samples"):
        batch.to_bytes()
    with pytest.raises(AttributeError, match="no attribute 'add_sprase'"):
        _ = batch.add_sprase


def test_w74_adding_features_forgets_no_memory() -> None:
    # The original forgot a small vector at every call.
    def held(times: int) -> int:
        for _ in range(times):
            batch = PyPersiaBatchData()
            for name in "abcdefgh":
                batch.add_id_type_feature(IDS, name)
            assert batch.batch_size == 3
        del batch
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        before = held(1)
        assert held(300) - before < 2400  # a byte a call
    finally:
        tracemalloc.stop()


class Fetched(PersiaDataset):
    """Sends batches from one array, which it refills for each."""

    def __init__(self, count: int, error: BaseException | None = None) -> None:
        super().__init__(buffer_size=3, async_iterator=True)
        self.count = count
        self.error = error

    def __len__(self) -> int:
        return self.count

    def fetch_data(self, persia_sender_channel: Sender) -> None:
        label = np.zeros((3, 1), np.float32)
        for number in range(self.count):
            label[:] = number
            batch = PyPersiaBatchData()
            batch.add_sparse([("user", IDS)])
            batch.add_target(label)
            persia_sender_channel.send(batch)
        if self.error is not None:
            raise self.error


def test_a_dataset_that_sends_is_one_that_yields() -> None:
    labels = [batch.labels[0].data[0, 0] for batch in Fetched(7)]
    assert labels == list(range(7))
    failing = iter(Fetched(2, KeyError("column")))
    assert [next(failing).batch_size for _ in range(2)] == [3, 3]
    with pytest.raises(KeyError, match="column"):
        next(failing)
    left = iter(Fetched(1000))
    next(left)
    left.close()  # type: ignore[attr-defined]  # its thread ends with it


def test_it_is_read_by_a_loader_of_then() -> None:
    loader = Dataloader(Fetched(5), 2, False, timeout=9000, reproducible=True)
    assert isinstance(loader, DataLoader)
    assert loader.timeout_ms == 9000
    with eval_ctx(embedding_worker=SpyWorker()) as ctx:
        labels = [ctx.prepare_features(batch)[2] for batch in loader]
    assert [each[0][0, 0].item() for each in labels if each] == list(range(5))
