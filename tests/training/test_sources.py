"""The dataset's thread: what it reads ahead, copies, raises and closes."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from persia.data import DataLoader, IterableDataset
from persia.embedding.data import (
    IDTypeFeatureWithSingleID,
    Label,
    NonIDTypeFeature,
    PersiaBatch,
)
from persia.errors import (
    DataError,
    DataTypeError,
)

from .conftest import MakeCtx, step
from .fakes import make_batch, u64
from .test_forward import WAIT_S, Batches, train_all


def test_w42_exception_in_the_dataset_is_raised_after_the_batches_before_it(
    make_ctx: MakeCtx,
) -> None:
    class Fails(IterableDataset):
        def __iter__(self) -> Iterator[PersiaBatch]:
            for number in range(5):
                yield make_batch(number, meta=b"%d" % number)
            raise KeyError("column 'price'")

    seen = []
    with make_ctx() as ctx:
        iterator = iter(DataLoader(Fails(), reproducible=True))
        for _ in range(5):
            batch = next(iterator)
            step(ctx, batch)
            seen.append(int(batch.meta or b""))
        with pytest.raises(KeyError, match="column 'price'") as caught:
            next(iterator)
        assert seen == [0, 1, 2, 3, 4]
        frames = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
        assert "__iter__" in frames
        # the context goes on
        assert train_all(ctx, DataLoader(Batches(2), reproducible=True)) == [0, 1]


def test_an_exception_in_the_dataset_has_the_users_frames(make_ctx: MakeCtx) -> None:
    def batches() -> Iterator[PersiaBatch]:
        yield PersiaBatch([])

    with pytest.raises(DataError, match="id_type_features") as caught, make_ctx():
        list(DataLoader(batches()))
    files = [frame.filename for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert files[0] == __file__  # the loop
    assert files[1:].count(__file__) == 1  # the dataset


def test_dataset_that_raises_while_it_is_closed_is_logged(
    make_ctx: MakeCtx, caplog: pytest.LogCaptureFixture
) -> None:
    class Fails(IterableDataset):
        def __iter__(self) -> Iterator[PersiaBatch]:
            try:
                while True:
                    yield make_batch()
            finally:
                raise KeyError("closing")

    with make_ctx():
        for _ in DataLoader(Fails()):
            break
    assert "the dataset raised while it was closed" in caplog.text


def test_a_refused_batch_ends_the_users_generator(make_ctx: MakeCtx) -> None:
    closed = threading.Event()

    def generate() -> Iterator[Any]:
        try:
            yield {}
        finally:
            closed.set()

    with make_ctx(), pytest.raises(DataTypeError) as caught:
        list(DataLoader(generate()))
    assert closed.wait(WAIT_S)
    del caught


def test_an_iterator_that_is_no_generator_is_not_closed(make_ctx: MakeCtx) -> None:
    class Reader:
        def __init__(self) -> None:
            self.is_closed = False

        def __iter__(self) -> Reader:
            return self

        def __next__(self) -> PersiaBatch:
            return make_batch()

        def close(self) -> None:
            self.is_closed = True

    reader = Reader()
    with make_ctx() as ctx:
        for batch in DataLoader(reader):
            step(ctx, batch)
            break
    assert not reader.is_closed


def test_dataset_must_yield_batches(make_ctx: MakeCtx) -> None:
    with make_ctx(), pytest.raises(DataTypeError, match="PersiaBatch, got dict"):
        list(DataLoader([{}]))  # type: ignore[list-item]


def test_w41_the_same_batch_can_be_yielded_again(make_ctx: MakeCtx) -> None:
    batch = make_batch(7, meta=b"7")
    with make_ctx() as ctx:
        assert train_all(ctx, DataLoader([batch] * 12)) == [7] * 12
    assert ctx.stats()["batches"] == 12
    assert batch.batch_id is None


def test_w37_a_generator_may_refill_its_arrays(make_ctx: MakeCtx) -> None:
    ids, dense, label = u64(0, 0), np.zeros((2, 2), np.float32), np.zeros((2, 1), np.float32)

    class Refills(IterableDataset):
        def __iter__(self) -> Iterator[PersiaBatch]:
            for number in range(20):
                ids[:], dense[:], label[:] = number, number, number
                yield PersiaBatch(
                    [IDTypeFeatureWithSingleID("user", ids)],
                    [NonIDTypeFeature(dense)],
                    [Label(label)],
                )

    with make_ctx(num_features=1):
        batches = list(DataLoader(Refills(), reproducible=True))
    for number, batch in enumerate(batches):
        assert batch.non_id_type_tensors[0].eq(number).all()
        assert batch.labels is not None
        assert batch.labels[0].eq(number).all()


def test_reading_ahead_is_bounded(make_ctx: MakeCtx) -> None:
    dataset = Batches(10**6, buffer_size=2)
    with make_ctx():
        iterator = iter(DataLoader(dataset, forward_buffer_size=3, num_workers=2))
        for _ in range(5):
            next(iterator)
        # 5 given, 3 ready, 2 in workers, 2 in the buffer, 1 in the dataset's hands
        assert dataset.read <= 5 + 3 + 2 + 2 + 1
        del iterator
