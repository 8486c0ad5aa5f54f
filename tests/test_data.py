"""Datasets and loaders: what they take, and where they can be iterated."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from persia.data import DataLoader, IterableDataset
from persia.embedding.data import PersiaBatch
from persia.errors import ConfigError, DataTypeError


class Numbers(IterableDataset):
    """Yields what the loader has no eyes for before it is iterated."""

    def __iter__(self) -> Iterator[PersiaBatch]:
        yield from range(5)  # type: ignore[misc]


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
    DataLoader([], reproducible=True, embedding_staleness=1)
    assert not caplog.text
    DataLoader([], reproducible=True)
    assert "bit-equal only with embedding_staleness=1, got None" in caplog.text
