"""Ids and vectors of others, as they are taken."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from persia._foreign.source import (
    IDBlock,
    IDSource,
    array_of_ids,
    as_ids,
    as_vectors,
    check_lengths,
)
from persia.errors import DataError, DataTypeError


def test_ids_and_vectors_of_other_dtypes_are_converted() -> None:
    assert as_ids("x", np.array([-1, 5], np.int32)).tolist() == [2**64 - 1, 5]
    assert as_ids("x", np.array([7, 9, 8], np.uint8)[::2]).tolist() == [7, 8]
    vectors = as_vectors("x", np.ones((4, 2), np.float16)[::2])
    assert vectors.dtype == np.float32
    assert vectors.flags.c_contiguous


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (
            lambda: as_ids("x", np.ones(2)),
            DataTypeError,
            r"x: expected ids .* got float64 \[2\]",
        ),
        (lambda: as_ids("x", np.ones((1, 2), int)), DataTypeError, r"got int64 \[1, 2\]"),
        (
            lambda: as_vectors("x", np.ones((1, 2), int)),
            DataTypeError,
            r"x: .* got int64 \[1, 2\]",
        ),
        (lambda: as_vectors("x", np.ones(2)), DataTypeError, r"got float64 \[2\]"),
        (lambda: as_vectors("x", np.ones((2, 0))), DataTypeError, r"got float64 \[2, 0\]"),
        (lambda: check_lengths("x", 2, 3), DataError, "x: expected a vector for each of 2 ids"),
    ],
)
def test_what_is_neither_is_refused(
    call: Callable[[], Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        call()


def test_lists_of_large_ids_are_not_rounded() -> None:
    assert array_of_ids([2**63 + 1, 5, -1]).tolist() == [2**63 + 1, 5, 2**64 - 1]
    assert array_of_ids([2**63 + 1, 0.5]).dtype == np.float64
    assert array_of_ids([2**64, 1]).dtype == object
    assert array_of_ids(torch.arange(3)).tolist() == [0, 1, 2]


def test_a_source_begins_again_each_time() -> None:
    one = IDBlock(np.zeros(1, np.uint64), np.zeros((1, 2), np.float32))
    source = IDSource("x", 2, 1, lambda: iter([one]))
    assert list(source.blocks()) == [one] == list(source.blocks())
