"""Hypothesis strategies for what users and peers send, whole and damaged."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

U64 = NDArray[np.uint64]

MAX_ID = 2**64 - 1

# The ends of the word, the sides of every power of two where a mask or a shift could slip,
# and a few ids so small that they repeat within a batch.
EDGE_IDS = sorted({0, MAX_ID} | {2**bit + side for bit in range(1, 64) for side in (-1, 0, 1)})


def ids() -> st.SearchStrategy[int]:
    """Any u64, with repeats and edges far more often than chance would bring."""
    return st.one_of(st.integers(0, 7), st.sampled_from(EDGE_IDS), st.integers(0, MAX_ID))


def id_lists(max_size: int = 60) -> st.SearchStrategy[list[int]]:
    return st.lists(ids(), max_size=max_size)


def samples(max_samples: int = 12, max_ids: int = 8) -> st.SearchStrategy[list[list[int]]]:
    """The ids of one feature, sample by sample; empty samples are common."""
    return st.one_of(
        st.lists(id_lists(max_ids), max_size=max_samples),
        st.lists(ids().map(lambda one: [one]), max_size=max_samples),
    )


def id_array(values: list[int]) -> U64:
    return np.array(values, dtype=np.uint64)


@st.composite
def layouts(draw: st.DrawFn, values: list[int]) -> U64:
    """The same ids in a contiguous, strided, reversed or read-only array."""
    array = id_array(values)
    layout = draw(st.sampled_from(["contiguous", "strided", "reversed", "read-only", "odd"]))
    if layout == "strided":
        wide = np.full((len(values), 3), MAX_ID, dtype=np.uint64)
        wide[:, 1] = array
        column: U64 = wide[:, 1]
        return column
    if layout == "reversed":
        backward: U64 = array[::-1].copy()[::-1]
        return backward
    if layout == "read-only":
        array.flags.writeable = False
    if layout == "odd":  # one byte off the word, as a field of a packed record is
        packed = np.zeros(len(values), dtype=np.dtype([("pad", "u1"), ("id", "<u8")]))
        packed["id"] = array
        field: U64 = packed["id"]
        return field
    return array


class CSR(NamedTuple):
    """Ids of one feature: ``values[offsets[i]:offsets[i + 1]]`` are those of sample i."""

    values: U64
    offsets: NDArray[Any]
    samples: list[list[int]]


OFFSET_DTYPES = (np.int32, np.int64, np.uint32)


def offsets_of(rows: list[list[int]], dtype: Any = np.int64) -> NDArray[Any]:
    return np.cumsum([0, *map(len, rows)]).astype(dtype)


@st.composite
def csr_batches(draw: st.DrawFn) -> CSR:
    rows = draw(samples())
    values = draw(layouts([one for row in rows for one in row]))
    return CSR(values, offsets_of(rows, draw(st.sampled_from(OFFSET_DTYPES))), rows)


class Damage(NamedTuple):
    """Offsets that do not fit ``num_values`` ids, and the place that the message names."""

    offsets: NDArray[Any]
    num_values: int
    place: int


@st.composite
def damaged_offsets(draw: st.DrawFn) -> Damage:
    """Sound offsets with exactly one thing wrong."""
    lengths = draw(st.lists(st.integers(1, 5), min_size=3, max_size=8))
    offsets = np.cumsum([0, *lengths])
    total = int(offsets[-1])
    kind = draw(st.sampled_from(["start", "decrease", "reach", "beyond", "short"]))
    dtype = draw(st.sampled_from([np.int32, np.int64]))
    place = len(lengths)
    if kind == "start":
        place = 0
        offsets[0] = draw(st.sampled_from([-1, 1, 7]))
    elif kind == "decrease":
        place = draw(st.integers(2, len(lengths) - 1))
        offsets[place] = offsets[place - 1] - 1
    elif kind == "reach":
        place = draw(st.integers(1, len(lengths) - 1))
        offsets[place] = draw(st.sampled_from([total + 1, 2**31 - 1]))
    elif kind == "beyond":
        offsets[-1] += draw(st.integers(1, 9))
    else:
        total += draw(st.integers(1, 9))
    return Damage(offsets.astype(dtype), total, place)


# Things that are not a 1-D array of u64, with a part of the message they earn.
NOT_IDS: list[tuple[Any, str]] = [
    (np.zeros(3, dtype=np.int64), "int64"),
    (np.zeros(3, dtype=np.int32), "int32"),
    (np.zeros(3, dtype=np.uint32), "uint32"),
    (np.zeros(3, dtype=np.float64), "float64"),
    (np.zeros(3, dtype=np.bool_), "bool"),
    (np.zeros(3, dtype=">u8"), ">u8"),
    (np.zeros(3, dtype=object), "object"),
    (np.zeros(3, dtype="M8[s]"), "datetime64"),
    (np.ma.masked_array(np.zeros(3, dtype=np.uint64), [False, True, False]), "a masked array"),
    (np.zeros((3, 1), dtype=np.uint64), "2 dimensions"),
    (np.uint64(3), "uint64"),
    (np.array(3, dtype=np.uint64), "0 dimensions"),
    ([1, 2, 3], "list"),
    (7, "int"),
    ("7", "str"),
    (None, "NoneType"),
]
