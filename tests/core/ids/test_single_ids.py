"""``persia._core.ids.single_ids`` against batches that are built one by one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from persia._core.ids.single_ids import single_ids
from persia.errors import DataError
from tests.reference import feature_batch as model
from tests.support import strategies as own

SIZES = st.integers(1, 6)


@st.composite
def arrays(draw: st.DrawFn, size: int) -> Any:
    """Draw an array as a request may have it, most of them with single ids."""
    length = draw(st.sampled_from((size, size, size, 1, 1, size + 1, 0)))
    ids = own.id_array(draw(st.lists(own.ids(), min_size=length, max_size=length)))
    as_signed = draw(st.booleans())
    values: Any = ids.view(np.int64) if as_signed else ids
    form = draw(st.sampled_from(("vector", "vector", "column", "column", "strange")))
    if form == "column":
        return values[:, None]
    if form == "strange":
        others = (
            values.astype(np.int32),
            values.astype(np.float64),
            values.astype(values.dtype.newbyteorder()),
            np.repeat(values, 2)[::2],
            np.stack([values, values], axis=1),
            values[:, None, None],
            np.ma.masked_array(values),
            values.tolist(),
            np.array(5),
            None,
        )
        return others[draw(st.integers(0, len(others) - 1))]
    # At an address that is no multiple of 8, as in the middle of a message.
    memory = bytearray(3) + values.tobytes()
    return np.frombuffer(memory, values.dtype, len(values), 3)


def expected(array: Any, size: int) -> model.FeatureBatch | None:
    if type(array) is not np.ndarray or array.dtype not in (np.int64, np.uint64):
        return None
    is_column = array.ndim == 2 and array.shape[1] == 1
    if not (array.ndim == 1 or is_column) or len(array) not in (1, size):
        return None
    if not array.flags.c_contiguous:
        return None
    ids = [one % 2**64 for one in array.reshape(-1).tolist()]
    return model.FeatureBatch([[one] for one in ids * (size // len(ids))])


@given(st.data(), SIZES)
def test_single_ids(data: st.DataObject, size: int) -> None:
    given = {f"f{place}": data.draw(arrays(size)) for place in range(4)}
    before = {name: np.array(one, copy=True) for name, one in given.items()}
    names = ("f3", "f0", "none", "f1", "f2")
    found = single_ids(names, given, size)
    assert len(found) == len(names)
    for name, batch in zip(names, found, strict=True):
        want = expected(given.get(name), size)
        assert (batch is None) == (want is None)
        if batch is None or want is None:
            continue
        assert (batch.name, batch.batch_size, batch.num_ids) == (name, size, size)
        assert batch.offsets is None
        assert batch.weights is None
        assert batch.distinct.tolist() == want.distinct
        assert batch.inverse.tolist() == want.inverse
        assert not batch.inverse.flags.writeable
        assert not batch.distinct.flags.writeable
    for name, one in before.items():
        if given[name] is not None:
            np.testing.assert_array_equal(np.asarray(given[name]), one)


def test_a_batch_keeps_no_array() -> None:
    ids = np.arange(3)
    user = np.array([7])
    many, one = single_ids(("a", "b"), {"a": ids, "b": user}, 3)
    ids[:] = user[:] = 9
    assert many is not None
    assert one is not None
    assert many.distinct.tolist() == [0, 1, 2]
    assert (one.distinct.tolist(), one.inverse.tolist()) == ([7], [0, 0, 0])


@pytest.mark.parametrize("size", [0, -1, 1 << 32])
def test_sizes_that_cannot_be(size: int) -> None:
    with pytest.raises(DataError, match=f"1 to 4294967294 samples, got {size}"):
        single_ids((), {}, size)
