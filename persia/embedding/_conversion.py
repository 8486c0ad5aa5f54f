"""Ids in the forms of other libraries, as arrays of ids and offsets: torch and Arrow.

Both libraries are recognised by their module's name: a data-loader without torch never imports
it, and pyarrow is optional and slow to import.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from persia.errors import DataError, DataTypeError

if TYPE_CHECKING:
    from numpy.typing import NDArray


def unsigned(values: Any) -> Any:
    """Return int64 ids as uint64 with the same bits; anything else as it is."""
    if isinstance(values, np.ndarray) and values.dtype == np.int64:
        return values.view(np.uint64)
    return values


def offsets_of(name: str, lengths: Any) -> NDArray[np.int64]:
    """Return where each sample begins among the ids, i64 [B + 1], from lengths [B]."""
    if (
        not isinstance(lengths, np.ndarray)
        or lengths.ndim != 1
        or lengths.dtype not in (np.int32, np.int64)
    ):
        got = (
            f"{lengths.dtype} of shape {lengths.shape}"
            if isinstance(lengths, np.ndarray)
            else type(lengths).__name__
        )
        raise DataTypeError(
            f"feature {name!r}: expected lengths as 1-D int32 or int64, got {got}"
        )
    # Descending offsets would be found later too; this says which length it was.
    if lengths.size and lengths.min() < 0:
        sample = int(np.argmax(lengths < 0))
        raise DataError(
            f"feature {name!r}: expected lengths of at least 0, "
            f"got {lengths[sample]} in sample {sample}"
        )
    offsets = np.zeros(lengths.size + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def from_torch(name: str, what: str, value: Any) -> Any:
    """Return the memory of a torch tensor as an array; anything else as it is."""
    if type(value).__module__.split(".")[0] != "torch" or not hasattr(value, "detach"):
        return value
    if value.device.type != "cpu":
        raise DataTypeError(
            f"feature {name!r}: expected {what} in CPU memory, got {value.device}; "
            "call .cpu() on it"
        )
    try:
        return value.detach().numpy()
    except (TypeError, RuntimeError) as exc:
        raise DataTypeError(
            f"feature {name!r}: expected {what} as a dense tensor of "
            f"{'float32' if what == 'weights' else 'integers'}, "
            f"got {value.dtype} with layout {value.layout}"
        ) from exc


def from_arrow(name: str, list_array: Any) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    """Return ids and offsets of an Arrow list array; ids without a copy if it can be done."""
    expected = f"feature {name!r}: expected an Arrow list array of uint64 or int64"
    if type(list_array).__module__.split(".")[0] != "pyarrow":
        raise DataTypeError(f"{expected}, got {type(list_array).__name__}")
    import pyarrow as pa

    if isinstance(list_array, pa.ChunkedArray):
        if list_array.num_chunks != 1:
            raise DataError(
                f"feature {name!r}: expected a chunked array of one chunk, got "
                f"{list_array.num_chunks}; call .combine_chunks() on it"
            )
        list_array = list_array.chunk(0)
    num_samples = len(list_array)
    if isinstance(list_array, pa.ListArray | pa.LargeListArray):
        # .offsets knows about slicing and .values does not, so they fit together.
        offsets = list_array.offsets.to_numpy().astype(np.int64)
    elif isinstance(list_array, pa.FixedSizeListArray):
        offsets = np.arange(num_samples + 1, dtype=np.int64) + list_array.offset
        offsets *= list_array.type.list_size
    else:
        raise DataTypeError(f"{expected}, got {getattr(list_array, 'type', type(list_array))}")
    child = list_array.values.slice(offsets[0], offsets[-1] - offsets[0])
    if child.type not in (pa.uint64(), pa.int64()):
        raise DataTypeError(f"{expected}, got {getattr(list_array, 'type', type(list_array))}")
    offsets -= offsets[0]
    values = (
        # By count: a buffer from elsewhere need not end where the ids do.
        np.frombuffer(child.buffers()[1], np.uint64, len(child), 8 * child.offset)
        if len(child)
        else np.empty(0, np.uint64)
    )
    return _without_nulls(name, list_array, child, values, offsets)


def _without_nulls(
    name: str, list_array: Any, child: Any, values: NDArray[np.uint64], offsets: NDArray[Any]
) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    """Leave out what lies behind absent lists, and refuse absent ids."""
    is_known = None
    if child.null_count:
        is_known = child.is_valid().to_numpy(zero_copy_only=False)
    if list_array.null_count:
        # An absent list is an empty sample. Arrow allows values to lie behind it; only then
        # is a copy needed, which leaves them out.
        is_list = list_array.is_valid().to_numpy(zero_copy_only=False)
        lengths = np.diff(offsets)
        if lengths[~is_list].any():
            keep = np.repeat(is_list, lengths)
            values = values[keep]
            is_known = None if is_known is None else is_known[keep]
            np.cumsum(np.where(is_list, lengths, 0), out=offsets[1:])
    if is_known is not None and not is_known.all():
        place = int(np.argmin(is_known))
        sample = int(np.searchsorted(offsets, place, side="right")) - 1
        raise DataError(f"feature {name!r}: expected ids, got a null in sample {sample}")
    return values, offsets
