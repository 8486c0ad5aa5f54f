"""``persia._core.distinct`` against its model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from persia._core.distinct import number
from persia._core.hashing import mix64_array
from persia.errors import DataTypeError
from tests import strategies as own
from tests.reference import distinct as model


@given(st.data(), own.id_lists(max_size=200))
def test_number(data: st.DataObject, values: list[int]) -> None:
    distinct, numbers = number(data.draw(own.layouts(values)))
    assert (distinct.dtype, numbers.dtype) == (np.uint64, np.uint32)
    assert (distinct.tolist(), numbers.tolist()) == model.number(values)


# The sides of a block, and of the size from which the table is fetched ahead.
@pytest.mark.parametrize("size", [0, 1, 31, 32, 33, 64, 65, 32768, 32769, 65536, 65537])
@pytest.mark.parametrize("num_values", [1, 100, 2**64 - 1])
def test_sizes(size: int, num_values: int) -> None:
    values = np.random.default_rng(size).integers(0, num_values, size, dtype=np.uint64)
    distinct, numbers = number(values)
    assert (distinct.tolist(), numbers.tolist()) == model.number(values.tolist())


def test_values_that_share_their_first_slot() -> None:
    # Of 200,000 values those whose hash begins with 8 zero bits: one long probe.
    values = np.arange(200_000, dtype=np.uint64)
    values = np.concatenate([values[mix64_array(values) >> np.uint64(56) == 0]] * 2)
    assert values.size > 1000
    distinct, numbers = number(values)
    assert (distinct.tolist(), numbers.tolist()) == model.number(values.tolist())


@pytest.mark.parametrize(("value", "message"), own.NOT_IDS)
def test_not_ids(value: Any, message: str) -> None:
    with pytest.raises(DataTypeError, match=message):
        number(value)
