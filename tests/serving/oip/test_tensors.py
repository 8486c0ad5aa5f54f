"""Values of every datatype go both ways unchanged, and what does not fit is one sentence."""

from __future__ import annotations

from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from persia._serving.oip.tensors import (
    DTYPES,
    RequestLimits,
    checked_shape,
    datatype_of,
    from_json,
    from_raw,
    to_json,
    to_raw,
)
from persia.errors import DataError

LIMITS = RequestLimits(elements=1000, rank=3)


@pytest.mark.parametrize("datatype", [*DTYPES])
def test_each_datatype_goes_both_ways(datatype: str) -> None:
    dtype = DTYPES[datatype]
    if dtype.kind in "iu":
        values = np.array([np.iinfo(dtype).min, np.iinfo(dtype).max, 1, 0], dtype)
    else:
        values = np.array([0, 1, 1, 0], dtype)
    values = values.reshape(2, 2)
    assert datatype_of(values) == datatype
    back = from_raw("x", datatype, (2, 2), to_raw(values))
    assert back.dtype == dtype
    assert back.flags.writeable
    assert np.array_equal(back, values)
    for data in (values.tolist(), orjson.loads(orjson.dumps(values.ravel().tolist()))):
        assert np.array_equal(from_json("x", datatype, (2, 2), data), values)
    text = orjson.dumps(to_json("x", values), option=orjson.OPT_SERIALIZE_NUMPY)
    assert np.array_equal(from_json("x", datatype, (2, 2), orjson.loads(text)), values)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.binary(max_size=20), max_size=8))
def test_bytes_go_both_ways(elements: list[bytes]) -> None:
    values = np.empty(len(elements), object)
    values[:] = elements
    assert from_raw("x", "BYTES", (len(elements),), to_raw(values)).tolist() == elements


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=40), st.integers(0, 5))
def test_any_bytes_are_read_or_refused(data: bytes, count: int) -> None:
    try:
        found = from_raw("x", "BYTES", (count,), data)
    except DataError:
        return
    assert to_raw(found) == data


def test_bytes_of_text_and_brain_floats() -> None:
    found = from_json("x", "BYTES", (2,), ["ä", ""])
    assert found.tolist() == ["ä".encode(), b""]
    assert to_json("x", found) == ["ä", ""]
    with pytest.raises(DataError, match="ask for binary"):
        to_json("x", np.array([b"\xff"], object))
    wide = np.array([1.5, -2.0], np.float32)
    cut = (wide.view(np.uint32) >> 16).astype("<u2").tobytes()
    assert np.array_equal(from_raw("x", "BF16", (2,), cut), wide)
    assert from_raw("x", "BOOL", (3,), b"\x00\x01\x07").tolist() == [False, True, True]


@pytest.mark.parametrize(
    ("shape", "text"),
    [
        ("2", "list of numbers"),
        ([1, 1, 1, 1], "rank"),
        ([True], "dimensions"),
        ([-1], "dimensions"),
        ([1.0], "dimensions"),
        ([1001], "at most 1000 elements"),
        ([1 << 62, 1 << 62, 0], "at most 1000 elements"),
    ],
)
def test_shapes_are_checked_before_memory_is_taken(shape: Any, text: str) -> None:
    with pytest.raises(DataError, match=text):
        checked_shape("x", shape, LIMITS)


@pytest.mark.parametrize(
    ("datatype", "shape", "data"),
    [
        ("INT64", (1,), [1 << 63]),
        ("UINT8", (1,), [-1]),
        ("INT32", (1,), [True]),
        ("INT32", (1,), [1.0]),
        ("BOOL", (1,), [1]),
        ("FP32", (1,), ["1"]),
        ("FP32", (1,), [1e39]),
        ("FP16", (1,), [70000.0]),
        ("BYTES", (1,), [1]),
        ("BF16", (1,), [1.0]),
        ("FP32", (2,), [1.0]),
        ("FP32", (2, 2), [[1.0, 2.0], [3.0]]),
        ("FP32", (2, 2), [[1.0, 2.0], 3.0]),
        ("FP32", (1, 1), [[[1.0]]]),
        ("FP32", (1,), 1.0),
        (7, (1,), [1.0]),
    ],
)
def test_json_that_does_not_fit(datatype: Any, shape: tuple[int, ...], data: Any) -> None:
    with pytest.raises(DataError, match="input 'x'"):
        from_json("x", datatype, shape, data)


def test_empty_tensors() -> None:
    shapes: tuple[list[Any], ...] = ([], [[], []])
    for data in shapes:
        assert from_json("x", "FP32", (2, 0), data).shape == (2, 0)
    assert from_json("x", "FP32", (), [1.0]).shape == ()
    assert from_raw("x", "BYTES", (0,), b"").shape == (0,)
