"""Rows on their way into the parts of a checkpoint, and their signs on the way back.

A part takes few rows of each block that comes out of a store, array by array, so copying them
is a matter of fetching early what lies far apart.
"""

from numpy cimport PyArray_DATA, PyArray_SIZE, ndarray

from persia._core.base.arrays cimport as_ids, as_vector
from persia._core.base.cpu cimport isa_level
from persia._core.base.hashing cimport NUM_BUCKETS, bucket_of, mix64
from persia._core.base.types cimport uint32_t, uint64_t, uint8_t

from persia.errors import DataError

cdef extern from "part_rows.h" nogil:
    enum:
        PERSIA_NUM_LEVELS

    ctypedef void (*persia_copy_rows_t)(
        char *out, const char *rows, size_t width, const uint32_t *places, size_t n
    ) noexcept nogil
    ctypedef size_t (*persia_strangers_t)(
        const uint64_t *signs, size_t n, uint64_t first, uint64_t count) noexcept nogil

    int persia_all_once(const uint64_t *signs, size_t n) noexcept nogil
    const persia_copy_rows_t[PERSIA_NUM_LEVELS] persia_copy_rows
    const persia_strangers_t[PERSIA_NUM_LEVELS] persia_strangers


def copy_rows(const uint8_t[:, ::1] rows not None, places, uint8_t[::1] out not None):
    """Copy rows by their places; see the stub."""
    cdef ndarray chosen = as_vector(places, c"u", 4, "places")
    cdef const uint32_t *of_places = <const uint32_t *> PyArray_DATA(chosen)
    cdef size_t n = PyArray_SIZE(chosen)
    cdef size_t width = rows.shape[1]
    cdef size_t i
    cdef uint32_t last = 0
    if <size_t> out.shape[0] != n * width:
        raise DataError(
            f"expected room for {n} rows of {width} bytes, got {out.shape[0]} bytes")
    if n == 0 or width == 0:
        return
    with nogil:
        for i in range(n):
            last = max(last, of_places[i])
    if last >= <size_t> rows.shape[0]:
        raise DataError(f"places: expected those of {rows.shape[0]} rows, got {last}")
    with nogil:
        persia_copy_rows[isa_level()](
            <char *> &out[0], <const char *> &rows[0, 0], width, of_places, n)


def find_stranger(signs, uint64_t first, uint64_t end):
    """Return the place of a sign of another bucket, or -1; see the stub."""
    cdef ndarray values = as_ids(signs, "signs")
    cdef const uint64_t *of_signs = <const uint64_t *> PyArray_DATA(values)
    cdef size_t n = PyArray_SIZE(values)
    cdef size_t i
    cdef size_t found
    if not first <= end <= NUM_BUCKETS:
        raise DataError(f"expected buckets in 0..{NUM_BUCKETS}, got {first}..{end}")
    with nogil:
        found = persia_strangers[isa_level()](of_signs, n, first, end - first)
    if found:
        for i in range(n):
            if not first <= bucket_of(mix64(of_signs[i])) < end:
                return i
    return -1


def all_once(signs):
    """Return whether each sign certainly comes once; see the stub."""
    cdef ndarray values = as_ids(signs, "signs")
    cdef const uint64_t *of_signs = <const uint64_t *> PyArray_DATA(values)
    cdef size_t n = PyArray_SIZE(values)
    cdef bint is_once
    with nogil:
        is_once = persia_all_once(of_signs, n)
    return is_once
