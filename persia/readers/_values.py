"""Values as scripts have them, a column's as one array.

value                                   samples
-------------------------------------   --------------------------------------------
a scalar, a text, None                  one
list, array or tensor [B], Series       B
list of B lists, nested tensor          B, each with any number of ids
array or tensor [B, n]                  B, each with n ids or numbers
``pyarrow.Array``                       as of a reader

Numbers without gaps become arrays of numpy, which costs a fifth of what Arrow's cost; all else
becomes an array of Arrow, so that it is what a reader would make of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Set
from typing import Any

import numpy as np
import pyarrow as pa

from persia.errors import DataTypeError

_SCALARS = (int, float, bool, str, bytes, type(None))


def array_of(column: str, value: Any) -> Any:
    """Return a column's values as an array of numpy [B] or [B, n], or else of Arrow [B].

    Raises:
        DataTypeError: If they are of several types, or of more dimensions.
    """
    kind = type(value)
    if kind is list and value and type(value[0]) in (int, float):
        return _of_numbers(column, value)
    if kind in _SCALARS:
        return _of_numbers(column, [value])
    if hasattr(value, "detach"):
        return _of_tensor(column, value)
    if isinstance(value, np.generic):
        value = np.asarray(value)
    if isinstance(value, np.ndarray) and not isinstance(value, np.ma.MaskedArray):
        return _of_numpy(column, value)
    if isinstance(value, pa.ChunkedArray):
        return value.combine_chunks()
    return value if isinstance(value, pa.Array) else _of_arrow(column, value)


def _of_numbers(column: str, values: list[Any]) -> Any:
    try:
        array = np.asarray(values)
        # Large ids beside small ones are floats to numpy, and beyond Arrow's signed integers.
        if array.dtype.kind == "f" and all(type(value) is int for value in values):
            array = np.asarray(values, np.uint64)
    except (ValueError, OverflowError):  # lists beside numbers, numbers beyond 64 bits
        return _of_arrow(column, values)
    return array if array.dtype.kind in "iufb" else _of_arrow(column, values)


def _of_tensor(column: str, value: Any) -> Any:
    value = value.detach().cpu()
    try:
        if value.is_nested:
            offsets = value.offsets().numpy().astype(np.int64)
            return pa.LargeListArray.from_arrays(offsets, pa.array(value.values().numpy()))
        return _of_numpy(column, value.numpy())
    except (TypeError, RuntimeError, AttributeError) as exc:
        if isinstance(exc, DataTypeError):
            raise
        raise DataTypeError(
            f"column {column!r}: expected a dense or jagged tensor of integers or floats that "
            f"numpy has, got {value.dtype} with layout {value.layout}"
        ) from exc


def _of_numpy(column: str, value: Any) -> Any:
    if value.ndim > 2:
        raise DataTypeError(
            f"column {column!r}: expected 1 or 2 dimensions, got {value.ndim} of {value.shape}"
        )
    if value.dtype.kind in "iufb":
        return value if value.ndim else value.reshape(1)
    return _of_arrow(column, value.tolist() if value.ndim else [value.item()])


def _of_arrow(column: str, value: Any) -> Any:
    if isinstance(value, Mapping | Set):  # Arrow would take the keys, in any order
        raise DataTypeError(
            f"column {column!r}: expected a value, or one for each sample in a list or array, "
            f"got {type(value).__name__}"
        )
    if isinstance(value, list | tuple | Iterator):
        value = [each.tolist() if hasattr(each, "detach") else each for each in value]
    try:
        array = _inferred(value if isinstance(value, Iterable) else [value])
    except (pa.ArrowException, TypeError, ValueError, OverflowError, KeyError) as exc:
        shown = " ".join(repr(value).split())  # a frame is shown in lines
        raise DataTypeError(
            f"column {column!r}: expected values of one type, got {shown:.80} ({exc})"
        ) from exc
    if isinstance(array, pa.ChunkedArray):  # of a Series that holds one
        array = array.combine_chunks()
    if pa.types.is_null(array.type):
        return array.cast(pa.int64())
    if pa.types.is_list(array.type) and pa.types.is_null(array.type.value_type):
        return array.cast(pa.list_(pa.int64()))
    return array


def _inferred(values: Iterable[Any]) -> Any:
    """Return values as an array of the type that Arrow finds for them."""
    try:
        return pa.array(values)
    except OverflowError:  # of integers it tries signed ones only
        is_of_lists = any(isinstance(each, Iterable) for each in values)
        return pa.array(values, pa.list_(pa.uint64()) if is_of_lists else pa.uint64())
