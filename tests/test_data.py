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
    [(Numbers, "got <class .*Numbers'>"), (lambda: (), "got <function"), (3, "got 3")],
)
def test_what_cannot_be_iterated_is_refused(dataset: Any, message: str) -> None:
    with pytest.raises(DataTypeError, match=message):
        DataLoader(dataset)
