"""Datasets and loaders: what they take, and where they can be iterated."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from persia.ctx import eval_ctx
from persia.data import DataLoader, IterableDataset, _Numbered
from persia.embedding.data import IDTypeFeatureWithSingleID, Label, PersiaBatch
from persia.errors import ConfigError, DataTypeError

SLOTS = {"user": {"dim": 2}}


class Numbers(IterableDataset):
    """Yields what the loader has no eyes for before it is iterated."""

    def __iter__(self) -> Iterator[PersiaBatch]:
        yield from range(5)  # type: ignore[misc]


class ByNumber:
    """As torch's map-style datasets: without ``__iter__``, and without an IndexError."""

    def __getitem__(self, number: int) -> PersiaBatch:
        labels = [Label(np.full((2, 1), number, np.float32))]
        return PersiaBatch([IDTypeFeatureWithSingleID("user", np.arange(2))], labels=labels)

    def __len__(self) -> int:
        return 3


def test_a_map_style_dataset_ends() -> None:
    dataset: Any = ByNumber()
    loader = DataLoader(dataset)
    with eval_ctx(model=torch.nn.Identity(), embedding_config={"slots_config": SLOTS}):
        for _ in range(2):
            # Bounded: this would not end where a dataset is read until an IndexError.
            passed = [batch.labels for batch in itertools.islice(loader, 10)]
            assert [labels and float(labels[0][0]) for labels in passed] == [0, 1, 2]
    assert list(_Numbered(dataset).iter_from(3)) == []
    (last,) = _Numbered(dataset).iter_from(2)
    assert last.labels[0].data.tolist() == [[2], [2]]


def test_a_dataset_is_sought_by_leaving_out() -> None:
    rest: list[object] = list(Numbers().iter_from(3))
    assert rest == [3, 4]
    with pytest.raises(ConfigError, match="buffer_size must be at least 1, got 0"):
        Numbers(0)


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (Numbers, "got Numbers; call it, and give what it returns"),
        (lambda: (), "got <lambda>; call it, and give what it returns"),
        (3, "got int; give a dataset"),
    ],
)
def test_what_cannot_be_iterated_is_refused(dataset: Any, message: str) -> None:
    with pytest.raises(DataTypeError, match=message):
        DataLoader(dataset)


def test_runs_that_are_not_bit_equal_are_told(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    for bound in (1, 10, "auto"):
        DataLoader([], reproducible=True, embedding_staleness=bound)
    DataLoader([], reproducible=True)
    assert not caplog.text
    DataLoader([], reproducible=True, embedding_staleness=None)
    assert "it needs a bound, such as embedding_staleness=1; it is None" in caplog.text


def test_a_loader_is_as_long_as_its_dataset() -> None:
    batches: list[Any] = [None] * 3
    assert len(DataLoader(batches)) == 3
    assert DataLoader([])
    unsized = DataLoader(Numbers())
    assert unsized
    with pytest.raises(TypeError, match=r"^this DataLoader has no len: its Numbers has none$"):
        len(unsized)
